"""What all tests share: one thread, no network, and the small language models of the embedded example."""

from __future__ import annotations

import os

# Before the first import of a library that reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pandas as pd
import pytest
import torch

from gradiend_dist import demo

# The models are so small that a second thread costs more than it brings; and bytes are comparable at one number only.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a BERT that knows he, she and they; shared by all tests, so never write to it."""
    return demo.build_masked_lm(tmp_path_factory.mktemp("masked_lm"))


@pytest.fixture(scope="session")
def causal_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a GPT-2 that knows he, she and they; shared by all tests, so never write to it."""
    return demo.build_causal_lm(tmp_path_factory.mktemp("causal_lm"))


@pytest.fixture
def feature_frames() -> dict[str, pd.DataFrame]:
    """Fresh frames of the classes M, F and N with columns masked, label and split; a test may change them."""
    return demo.feature_data()
