"""Runs that end early and are started again: resumed = uninterrupted, bit for bit, in one process."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments, UserError, demo
from gradiend_dist.space import Slices
from gradiend_dist.storage.files import link_tree
from gradiend_dist.training.checkpoint_io import CutTensor
from gradiend_dist.training.generators import generator_states, set_generators
from gradiend_dist.training.plain_values import plain_fields
from gradiend_dist.training.state import StateKeeper


@pytest.fixture(scope="module", autouse=True)
def _states_are_complete() -> Iterator[None]:
    """These runs crash within a living process, where a thread would go on writing what the next run reads."""
    save = StateKeeper.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateKeeper, "save", lambda self, loop, step, **_: save(self, loop, step, wait=True))
        yield


class Crash(Exception):
    pass


class CrashAt(TrainerCallback):
    """Ends the work of the process at a step; None: never."""

    def __init__(self, step: int | None) -> None:
        self._fuse = (step,)  # a tuple: no part of the state that is saved

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == self._fuse[0]:
            raise Crash


class DrawsNumbers(TrainerCallback):
    """A user's callback with a history and a need for random numbers."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.drawn.append(random.random() + float(np.random.rand()) + float(torch.rand(())))
        control.draws = len(self.drawn)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        Path(args.experiment_dir, "drawn.json").write_text(json.dumps(self.drawn))


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    values = {
        "experiment_dir": str(directory),
        "pre_prune_config": PrePruneConfig(n_samples=4, topk=0.05, source="diff"),
        "train_batch_size": 7,
        "train_max_size": 40,
        "encoder_eval_train_max_size": 3,
        "encoder_eval_max_size": 3,
        "max_steps": 17,
        "eval_steps": 4,
        "save_steps": 5,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "max_seeds": 2,
        "min_convergent_seeds": None,
        "seed": 3,
    }
    return TrainingArguments(**{**values, **changes})


def train(
    model: Path, frames: dict[str, Any], directory: Path, callbacks: list[TrainerCallback] | None = None, **changes: Any
) -> TextPredictionTrainer:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    trainer = TextPredictionTrainer(
        str(model), data=frames, target_classes=["M", "F"], args=arguments(directory, **changes)
    )
    return trainer.train(callbacks=callbacks or [])


def result(directory: Path) -> tuple[Any, ...]:
    stats = json.loads((directory / "training_stats.json").read_text())
    for seed in stats["seeds"].values():
        del seed["time"]
    weights = load_file(directory / "model" / "model.safetensors")
    return stats["best_seed"], stats["seeds"], {name: tensor.numpy().tobytes() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def whole(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Runs without a crash, with seeds in sequence or in lockstep; never write to them."""

    @cache
    def run(together: bool) -> Path:
        directory = tmp_path_factory.mktemp("whole")
        callbacks = [DrawsNumbers(), CrashAt(None)]
        train(masked_lm, demo.feature_data(), directory, callbacks, seeds_in_parallel=together)
        return directory

    return run


@pytest.fixture(scope="module")
def _crashed(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("crashed") / "run"
    crash(masked_lm, demo.feature_data(), directory)
    return directory


@pytest.fixture
def crashed(_crashed: Path, tmp_path: Path) -> Path:
    """A copy of a run that has crashed after step 12, with states of the steps 5 and 10."""
    return shutil.copytree(_crashed, tmp_path / "crashed")


# The first state, one between two states, and the last step of a seed.
@pytest.mark.parametrize(
    ("together", "step"), [(False, 5), (True, 9), (False, 17)], ids=["sequence 5", "lockstep 9", "sequence 17"]
)
def test_resume__is_bit_for_bit_the_uninterrupted_run(masked_lm, feature_frames, tmp_path, whole, together, step):
    """Fails if optimizer, schedule, history, best checkpoint, random numbers or a callback's state are not restored."""
    options = {"seeds_in_parallel": together}
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path, [DrawsNumbers(), CrashAt(step)], **options)
    train(masked_lm, feature_frames, tmp_path, [DrawsNumbers(), CrashAt(None)], **options)
    assert result(whole(together)) == result(tmp_path)
    assert (whole(together) / "drawn.json").read_text() == (tmp_path / "drawn.json").read_text()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("store", [None, 0.0], ids=["kept", "not kept"])
def test_resume__refines_a_closed_form_to_the_same_bits(masked_lm, feature_frames, tmp_path, store):
    """Fails if the rates are not those of the first start, or gradients are computed in another way than before."""
    options = {"initialization": "spectral", "learning_rate": "auto", "spectral_items": 7, "gradient_store_gib": store}
    train(masked_lm, feature_frames, tmp_path / "a", [CrashAt(None)], **options)
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path / "b", [CrashAt(9)], **options)
    train(masked_lm, feature_frames, tmp_path / "b", [CrashAt(None)], **options)
    assert result(tmp_path / "a") == result(tmp_path / "b")


def test_resume__early_stopping_stops_at_the_same_step(masked_lm, feature_frames, tmp_path):
    """Fails if the patience that was used up before the crash is given again."""
    options = {"max_seeds": 1, "learning_rate": 1e-7, "eval_steps": 1}
    early = {"early_stopping_patience": 9, "early_stopping_threshold": 0.5}
    train(masked_lm, feature_frames, tmp_path / "a", [EarlyStoppingCallback(**early), CrashAt(None)], **options)
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path / "b", [EarlyStoppingCallback(**early), CrashAt(7)], **options)
    train(masked_lm, feature_frames, tmp_path / "b", [EarlyStoppingCallback(**early), CrashAt(None)], **options)
    stopped = len(json.loads((tmp_path / "a/training_stats.json").read_text())["losses"])
    assert stopped < 17
    assert result(tmp_path / "a") == result(tmp_path / "b")


def test_resume__finished_seeds_are_not_trained_again(masked_lm, feature_frames, tmp_path, whole, monkeypatch):
    class CrashInSecond(CrashAt):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if (tmp_path / "b/seeds/seed_3").exists():
                self._fuse = (6,)

    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path / "b", [CrashInSecond(None)])
    before = (tmp_path / "b/seeds/seed_3/model.safetensors").stat().st_mtime_ns
    seen = []
    monkeypatch.setattr("gradiend_dist.training.seed_group.GroupTraining._complete", _recording(seen))
    train(masked_lm, feature_frames, tmp_path / "b", [CrashAt(None)], keep_seed_runs=False)
    assert seen == [4]
    assert result(whole(False)) == result(tmp_path / "b")
    assert before


def _recording(seen: list[int]) -> Any:
    from gradiend_dist.training.seed_group import GroupTraining

    plain = GroupTraining._complete

    def complete(self: Any, run: Any, loop: Any) -> Any:
        seen.append(run.seed)
        return plain(self, run, loop)

    return complete


def crash(masked_lm: Path, frames: dict[str, Any], directory: Path, **changes: Any) -> None:
    with pytest.raises(Crash):
        train(masked_lm, frames, directory, [CrashAt(12)], **changes)


def test_resume__with_another_argument_is_refused_by_its_name(masked_lm, feature_frames, crashed):
    with pytest.raises(UserError, match=r"with learning_rate=0\.003, now it is 0\.004: pass the same.*--resume false"):
        train(masked_lm, feature_frames, crashed, learning_rate=4e-3)
    feature_frames["M"] = feature_frames["M"].iloc[1:]
    with pytest.raises(UserError, match="with data="):
        train(masked_lm, feature_frames, crashed)
    assert sorted(path.name for path in (crashed / "state").glob("step*")) == ["step_00000005", "step_00000010"]


def test_resume__what_has_no_effect_may_change(masked_lm, feature_frames, crashed, whole):
    train(masked_lm, feature_frames, crashed, [CrashAt(None)], logging_steps=3, base_micro_batch_size=None)
    assert result(whole(False)) == result(crashed)


def test_resume__switched_off_starts_anew(masked_lm, feature_frames, crashed):
    train(masked_lm, feature_frames, crashed, resume=False, learning_rate=4e-3)
    assert not (crashed / "state").exists()


def test_limit__keeps_the_newest_states(masked_lm, feature_frames, tmp_path):
    crash(masked_lm, feature_frames, tmp_path, save_steps=2, save_total_limit=3)
    names = sorted(path.name for path in (tmp_path / "state").glob("step*"))
    assert names == ["step_00000006", "step_00000008", "step_00000010"]


def test_strategy_no__saves_no_state(masked_lm, feature_frames, tmp_path):
    crash(masked_lm, feature_frames, tmp_path, save_strategy="no")
    assert not (tmp_path / "state").exists()


def test_trigger_file__saves_at_once_and_is_taken_away(masked_lm, feature_frames, tmp_path, monkeypatch):
    monkeypatch.setattr("gradiend_dist.training.state.LOOK_SECONDS", 0.0)

    class Asks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step == 6:
                (tmp_path / "SAVE_STATE").touch()

    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path, [Asks(), CrashAt(9)], save_steps=500)
    assert [path.name for path in (tmp_path / "state").glob("step*")] == ["step_00000007"]
    assert not (tmp_path / "SAVE_STATE").exists()


@pytest.mark.parametrize("damage", ["truncated", "missing file", "no marker", "marker is no JSON"])
def test_damaged_state__is_passed_over_for_the_one_before(masked_lm, feature_frames, crashed, whole, damage, caplog):
    newest = crashed / "state/step_00000010"
    if damage == "truncated":
        file = next((newest / "tensors").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "missing file":
        (newest / "progress.json").unlink()
    elif damage == "no marker":
        (newest / "complete.json").unlink()
    else:
        (newest / "complete.json").write_text("{")
    with caplog.at_level("INFO"):
        train(masked_lm, feature_frames, crashed, [CrashAt(None)])
    assert "is passed over" in caplog.text and "going on after step 5" in caplog.text
    assert result(whole(False)) == result(crashed)


def test_foreign_state__is_refused(masked_lm, feature_frames, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state/run.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="of another version"):
        train(masked_lm, feature_frames, tmp_path)


def test_refused_run__leaves_no_state(masked_lm, feature_frames, tmp_path):
    feature_frames["M"].loc[0, "masked"] = "no blank here"
    with pytest.raises(UserError):
        train(masked_lm, feature_frames, tmp_path, max_length=1)
    assert not list(tmp_path.iterdir())


# --- parts


def test_cut_tensor__tells_its_ranges_of_the_whole():
    part = Slices(10, ((1, 4), (6, 6), (8, 10)))
    cut = CutTensor.of(torch.arange(10.0).reshape(5, 2), part)
    assert cut.size() == (10, 2)
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in cut.__create_chunk_list__()]
    assert chunks == [((1, 0), (3, 2)), ((8, 0), (2, 2))]
    second = cut.__create_write_items__("x", cut)[1].index
    assert torch.equal(cut.__get_tensor_shard__(second), torch.arange(6.0, 10.0).reshape(2, 2))


def test_generators__come_back():
    before = generator_states()
    expected = (random.random(), np.random.rand(), torch.rand(3))
    set_generators(before)
    assert (random.random(), np.random.rand()) == expected[:2] and torch.equal(torch.rand(3), expected[2])


def test_plain_fields__leave_out_what_no_file_should_hold():
    class Thing:
        def __init__(self) -> None:
            self.number, self.nested, self.tensor, self.function = 3, {"a": [1, None]}, torch.ones(1), print

    assert plain_fields(Thing()) == {"number": 3, "nested": {"a": [1, None]}}


def test_link_tree__shares_files_and_survives_a_replacement(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text("old")
    link_tree(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a/file").stat().st_ino == (tmp_path / "b/file").stat().st_ino
    (tmp_path / "a/file").unlink()
    (tmp_path / "a/file").write_text("new")
    assert (tmp_path / "b/file").read_text() == "old"


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("evil", ["a function", "a name of torch's"])
def test_state__that_would_run_code_is_refused(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path, evil: str
) -> None:
    """Fails if a state from elsewhere is unpickled as it is."""
    name = "tensors/.metadata"
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path / "run", [CrashAt(8)])
    (state,) = (tmp_path / "run" / "state").glob("step_*")
    size = (state / name).stat().st_size
    command = f"touch {tmp_path / 'ran'}"
    if evil == "a function":
        (state / name).write_bytes(pickle.dumps(Evil(command)))
    else:  # a name that the allowed module has imported itself
        (state / name).write_bytes(
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93\x8c"
            + bytes([len(command)])
            + command.encode()
            + b"\x85R."
        )
    complete = json.loads((state / "complete.json").read_text())
    complete["sizes"][name] = (state / name).stat().st_size
    assert size != complete["sizes"][name]
    (state / "complete.json").write_text(json.dumps(complete))
    with pytest.raises(UserError, match="is damaged: pass --resume false"):
        train(masked_lm, feature_frames, tmp_path / "run", [CrashAt(None)])
    assert not (tmp_path / "ran").exists()


def test_state__holds_no_pickle_but_the_notes_of_torch(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path / "run", [CrashAt(8)])
    kinds = {path.suffix or path.name for path in (tmp_path / "run" / "state").rglob("*") if path.is_file()}
    assert kinds == {".json", ".safetensors", ".distcp", ".metadata"}


def test_evaluation_of_a_user__that_gives_numbers_of_numpy_goes_on_the_same(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path
) -> None:
    """Fails if such a score is lost with the state, and a worse checkpoint then takes the place of the best one."""

    class Scores:
        def __init__(self) -> None:
            self.left = [0.2, 0.9, 0.5, 0.4, 0.3, 0.1]

        def __call__(self, _model: Any) -> dict[str, Any]:
            return {"correlation": np.float64(self.left.pop(0)), "mean_by_class": {1.0: torch.tensor(0.5)}}

        def __repr__(self) -> str:
            return "Scores"

    scores = Scores()
    options: dict[str, Any] = {"max_seeds": 1, "evaluate_fn": scores}
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path / "run", [CrashAt(6)], **options)  # the best one was at step 4
    scores.left = [0.5, 0.4, 0.3, 0.1]
    trainer = train(masked_lm, feature_frames, tmp_path / "run", [CrashAt(None)], **options)
    assert trainer.get_training_stats()["best_score_checkpoint"]["correlation"] == 0.9
