"""Counts everything that ranks send each other while they train, evaluate and save: see test_traffic.py.

Started by together_script.py. Every rank writes RESULTS/rank_<r>.json.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from world_script import PRONOUNS, TIMEOUT, frames

from gradiend_dist import TextPredictionTrainer, TrainingArguments
from gradiend_dist.distributed.launch import Launch
from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.gradients import base as gradients
from gradiend_dist.gradients.buckets import Buckets

BUCKET = 10_000
KINDS = ["alternative", "diff"]


class Counting(TorchDispatchMode):
    """Sees every collective of the process, whoever starts it: all go through torch's dispatcher as c10d operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        if func.namespace == "c10d":
            sides = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args[:2]]
            received, given = sides if len(sides) == 2 and sides[1] else (sides[0], sides[0])
            self.seen.append(
                {
                    "name": func._schema.name.removeprefix("c10d::"),
                    "received": sum(tensor.numel() for tensor in received),
                    "given": sum(tensor.numel() for tensor in given),
                    "bytes": max((t.numel() * t.element_size() for t in [*received, *given]), default=0),
                    "floats": all(tensor.dtype == torch.float32 for tensor in received),
                }
            )
        return func(*args, **(kwargs or {}))


def make_trainer(model: str, results: Path, **changes: Any) -> TextPredictionTrainer:
    args: dict[str, Any] = {
        "experiment_dir": str(results), "train_batch_size": 4, "train_max_size": 8, "encoder_eval_max_size": 4,
        "max_steps": 3, "eval_steps": 1, "learning_rate": 1e-3, "max_seeds": 1, "ddp_timeout": TIMEOUT,
    }  # fmt: skip
    return TextPredictionTrainer(
        model, data=frames(PRONOUNS), target_classes=["M", "F"], args=TrainingArguments(**{**args, **changes})
    )


def single_steps(model: str, results: Path) -> dict[str, Any]:
    """What one step moves, by the number of items in it: gradients of the base, then the step itself."""
    trainer = make_trainer(model, results, gradient_store_gib=0.0)
    session = trainer.session
    engine = session.spread.make_engine(session.new_model(session.space, 0).gradiend, StepOptions.of(trainer.args))
    source, rows = session.gradients(session.space), trainer.inputs.training_items()
    found: dict[str, Any] = {"n": session.space.size, "part": engine.slices.size}
    found["trained"] = sum(p.numel() for p in session.base_model.parameters() if p.requires_grad)
    for num_items in (1, 1, 3):  # the first time ranks tell each other which weights get no gradient
        with Counting() as counting:
            vectors = []
            for start in range(num_items):
                item = rows.item(range(4 * start, 4 * start + 4))
                vectors.append({kind: v.clone() for kind, v in source.get(item, KINDS, keep=False).items()})
        gathered = counting.seen
        with Counting() as counting:
            x, y = (torch.stack([vector[kind] for vector in vectors]) for kind in KINDS)
            engine.step([GradiendBatch(x, y, torch.ones(num_items, 1))], 1e-3)
        found[f"{num_items} items"] = {"gradients": gathered, "step": counting.seen}
    return found


def whole_run(model: str, results: Path, **changes: Any) -> list[dict[str, Any]]:
    """All that `train` and `evaluate_encoder` move: evaluations, checkpoints and the promoted model included."""
    trainer = make_trainer(model, results, **changes)
    session = trainer.session
    with Counting() as counting:
        trainer.train()
        trainer.evaluate_encoder("test")
    assert session is trainer.session
    return counting.seen


def work(launch: Launch, model: str, results: Path) -> None:
    """All ranks call this."""
    found = {"ranks": launch.comm.world_size, "shards_base": launch.shards_base}
    with patch.object(gradients, "Buckets", functools.partial(Buckets, size=BUCKET)):
        found |= single_steps(model, results / "steps")
        found["kept"] = whole_run(model, results / "kept")
        found["streamed"] = whole_run(model, results / "streamed", gradient_store_gib=0.0, max_seeds=2)
    (results / f"rank_{launch.comm.rank}.json").write_text(json.dumps(found))
    launch.comm.meet("writing results")
