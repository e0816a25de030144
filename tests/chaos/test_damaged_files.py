"""Every file of an unfinished run, damaged in every way: the run goes on to the same result, or says what is damaged in
one sentence; never an exception of another kind, never another model, and no code from a file runs."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments, UserError, demo
from gradiend_dist.training.state import StateKeeper

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Crash(Exception):
    pass


class CrashInSecondSeed(TrainerCallback):
    """One seed is finished then, and the other has two states."""

    def __init__(self, directory: Path) -> None:
        self._first = (directory / "seeds" / "seed_0",)  # a tuple: no part of the state that is saved

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == 5 and self._first[0].exists():
            raise Crash


class LeavesMark:
    """Where it is unpickled, a file appears."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def train(model: Path, directory: Path, *callbacks: TrainerCallback) -> None:
    args = TrainingArguments(
        experiment_dir=str(directory),
        pre_prune_config=PrePruneConfig(n_samples=4, topk=0.02, source="diff"),
        train_batch_size=5,
        train_max_size=20,
        encoder_eval_train_max_size=2,
        encoder_eval_max_size=2,
        max_steps=6,
        eval_steps=2,
        save_steps=2,
        learning_rate=0.01,
        max_seeds=2,
        min_convergent_seeds=None,
        seed=0,
    )
    data = demo.feature_data()
    TextPredictionTrainer(str(model), data=data, target_classes=["M", "F"], args=args).train(callbacks=callbacks)


def result(directory: Path) -> tuple[Any, ...]:
    stats = json.loads((directory / "training_stats.json").read_text())
    for seed in stats["seeds"].values():
        del seed["time"]
    weights = load_file(directory / "model" / "model.safetensors")
    return stats["best_seed"], stats["seeds"], {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def runs(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], tuple[Any, ...]]:
    """Makes a copy of a run that has crashed, and says what it would have ended with."""
    root = tmp_path_factory.mktemp("runs")
    save = StateKeeper.save
    with pytest.MonkeyPatch.context() as patch:  # in a living process a thread would go on writing after the crash
        patch.setattr(StateKeeper, "save", lambda self, loop, step, **_: save(self, loop, step, wait=True))
        train(masked_lm, root / "whole")
        with pytest.raises(Crash):
            train(masked_lm, root / "crashed", CrashInSecondSeed(root / "crashed"))
    expected = result(root / "whole")

    def copy(target: Path) -> tuple[Any, ...]:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(root / "crashed", target)
        return expected

    return copy


def truncate(path: Path, _mark: Path, _rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path, _mark: Path, _rng: random.Random) -> None:
    path.write_bytes(b"")


def garbage(path: Path, _mark: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def one_bit(path: Path, _mark: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def wrong_type(path: Path, _mark: Path, rng: random.Random) -> None:
    """Of the whole file, or of one of its values, where it is JSON."""
    if path.suffix != ".json":
        path.write_text("[]")
        return
    content = json.loads(path.read_text())
    wrong: list[Any] = [[], 3, "x", None, {}, -1, True]
    if isinstance(content, dict) and content and rng.random() < 0.7:
        content[rng.choice(sorted(content))] = rng.choice(wrong)
    else:
        content = rng.choice(wrong)
    path.write_text(json.dumps(content))


def missing(path: Path, _mark: Path, _rng: random.Random) -> None:
    path.unlink()


def directory(path: Path, _mark: Path, _rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def harmful_pickle(path: Path, mark: Path, _rng: random.Random) -> None:
    path.write_bytes(pickle.dumps(LeavesMark(mark)))


DAMAGES = (truncate, empty, garbage, one_bit, wrong_type, missing, directory, harmful_pickle)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_file__is_another_start_or_one_sentence(masked_lm, runs, tmp_path, damage):
    run, mark = tmp_path / "run", tmp_path / "mark"
    expected = runs(run)
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    assert len(names) > 30
    broken, refused = [], []
    for name in names:
        runs(run)
        damage(run / name, mark, random.Random(f"{damage.__name__} {name}"))
        try:
            train(masked_lm, run)
            if result(run) != expected:
                broken.append(f"{name}: another result")
        except UserError as error:
            refused.append(f"{name}: {error}")
            if "\n" in str(error):
                broken.append(f"{name}: more than one line")
        except Exception as error:  # what the test is about: anything else is a traceback for the user
            broken.append(f"{name}: {type(error).__name__}: {error}")
        assert not mark.exists(), f"{name} ran code"
    print(f"{damage.__name__}: {len(names)} files, {len(refused)} refused, {len(broken)} broken")
    print("\n".join([*refused, "", *broken]))
    assert not broken, "\n".join(broken)
