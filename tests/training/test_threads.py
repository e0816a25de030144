"""Two trainers in threads of one process: each gets what it gets alone.

Up to the order of sums: while one is in forward mode, the other's attention is computed by the plain kernel as well.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch.autograd.forward_ad as forward_ad
from stage import WORDS, frame

from gradiend_dist import TextPredictionTrainer, TrainingArguments


def results(model: Path, directory: Path) -> Any:
    args = TrainingArguments(
        experiment_dir=str(directory), max_seeds=1, max_steps=3, train_batch_size=2, learning_rate=1e-3, eval_steps=2,
        gradient_store_gib=0.0,
    )  # fmt: skip
    data = {name: frame(name) for name in WORDS}
    trainer = TextPredictionTrainer(str(model), data=data, target_classes=["M", "F"], args=args)
    trainer.train()
    found = trainer.evaluate_encoder(split="test")
    numbers = [*trainer.get_training_stats()["losses"], found["correlation"]]
    return pytest.approx(numbers, rel=1e-3) if directory.name == "alone" else numbers


def test_trainers__in_threads_get_what_each_gets_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where models are loaded at the same time, which leaves them without some of their weights, or where two
    forward-mode passes overlap, which torch refuses; the pause makes sure that they would."""
    tokenizer = tiny.wordpiece_tokenizer()
    tiny.base_model("bert", len(tokenizer)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    alone = results(tmp_path / "bert", tmp_path / "alone")

    enter = forward_ad.dual_level.__enter__

    def slowly(self: Any) -> Any:
        level = enter(self)
        time.sleep(0.02)
        return level

    monkeypatch.setattr(forward_ad.dual_level, "__enter__", slowly)
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        try:
            found[number] = results(tmp_path / "bert", tmp_path / str(number))
        except Exception as error:  # shown by the comparison below
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {0: alone, 1: alone}
