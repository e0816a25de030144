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
from gradiend_dist.storage.sums import directory_sums
from gradiend_dist.training.checkpoint_io import CutTensor
from gradiend_dist.training.generators import generator_states, set_generators
from gradiend_dist.training.plain_values import plain_fields
from gradiend_dist.training.seed_training import SeedTraining
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


@pytest.mark.parametrize(("store", "moments"), [(None, "float32"), (0.0, "bfloat16")], ids=["kept", "not kept"])
def test_resume__refines_a_closed_form_to_the_same_bits(masked_lm, feature_frames, tmp_path, store, moments):
    """Fails if the rates are not those of the first start, gradients are computed in another way than before, or the
    random numbers that moments are rounded with are others."""
    options = {"initialization": "spectral", "learning_rate": "auto", "spectral_items": 7, "gradient_store_gib": store}
    options["moments_dtype"] = moments
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


def test_two_runs__in_one_directory_are_one_too_many(masked_lm, feature_frames, tmp_path):
    """Fails if the second one trains, or leaves a trace; afterwards the directory is free again."""

    class StartsAnother(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step == 1:
                before = sorted(tmp_path.rglob("*"))
                with pytest.raises(UserError, match="in use by another run"):
                    train(masked_lm, feature_frames, tmp_path, learning_rate=0.5)
                assert sorted(tmp_path.rglob("*")) == before

    train(masked_lm, feature_frames, tmp_path, [StartsAnother()], max_steps=2, max_seeds=1)
    assert not list(tmp_path.glob("*.lock"))


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


def sign(state: Path) -> None:
    """As if what a state now holds were what was written."""
    complete = state / "complete.json"
    facts = json.loads(complete.read_text())
    complete.unlink()
    complete.write_text(json.dumps({**facts, "files": directory_sums(state)}))


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("progress.json", {"step": 10**9}),
        pytest.param("progress.json", {"step": -1}, marks=pytest.mark.slow),
        pytest.param("progress.json", {"runs": []}, marks=pytest.mark.slow),
        pytest.param("progress.json", {"seconds": "long"}, marks=pytest.mark.slow),
        ("generators_0.json", {"torch": [1, "x"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value.items())).__repr__(),
)
def test_wrong_value__is_no_state_even_where_the_checksums_fit(
    masked_lm, feature_frames, crashed, whole, name, changes, caplog
):
    """Fails if a step of 10^9 ends the training at once, or if a wrong type is a traceback."""
    newest = crashed / "state/step_00000010"
    rewrite(newest / name, **changes)
    sign(newest)
    with caplog.at_level("INFO"):
        train(masked_lm, feature_frames, crashed, [CrashAt(None)])
    assert caplog.text.count("is passed over") == 1 and "going on after step 5" in caplog.text
    assert result(whole(False)) == result(crashed)


@pytest.mark.parametrize(
    "name",
    [
        "tensors/__0_0.distcp",
        pytest.param("generators_0.json", marks=pytest.mark.slow),
        pytest.param("best_3/model.safetensors", marks=pytest.mark.slow),
    ],
)
def test_one_bit__is_seen(masked_lm, feature_frames, crashed, whole, name, caplog):
    """Fails if only sizes are compared: the result would be another one."""
    file = crashed / "state/step_00000010" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.unlink()  # it may share its bytes with another one
    file.write_bytes(content)
    with caplog.at_level("INFO"):
        train(masked_lm, feature_frames, crashed, [CrashAt(None)])
    assert "is not as it was written" in caplog.text and "going on after step 5" in caplog.text
    assert result(whole(False)) == result(crashed)


def test_one_bit_of_a_large_file_of_tensors__is_seen_by_its_own_checksum(
    masked_lm, feature_frames, crashed, whole, monkeypatch, caplog
):
    monkeypatch.setattr("gradiend_dist.storage.sums.SMALL", 0)
    file = crashed / "state/step_00000010/tensors/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    sign(crashed / "state/step_00000005")
    sign(crashed / "state/step_00000010")
    with caplog.at_level("INFO"):
        train(masked_lm, feature_frames, crashed, [CrashAt(None)])
    assert "step_00000010 is passed over: tensors" in caplog.text and "going on after step 5" in caplog.text
    assert result(whole(False)) == result(crashed)


@pytest.mark.parametrize(
    "content", ["", "[]", "3", '{"format": 3}', "change", "directory"], ids=lambda content: content or "empty"
)
def test_damaged_run_file__is_one_sentence_with_the_remedy(masked_lm, feature_frames, crashed, content):
    """Fails with a traceback, or if seeds that were never trained count as done."""
    path = crashed / "state/run.json"
    if content == "change":
        rewrite(path, seeds_done=[3])
    else:
        path.unlink()
        path.mkdir() if content == "directory" else path.write_text(content)
    with pytest.raises(UserError, match=r"run.json .*(--resume false|damaged|cannot be read)"):
        train(masked_lm, feature_frames, crashed)


def test_states_without_their_run__are_not_taken_for_this_one(masked_lm, feature_frames, crashed, tmp_path):
    """Fails if a run goes on from the state of one with another learning rate."""
    (crashed / "state/run.json").unlink()
    train(masked_lm, feature_frames, crashed, [CrashAt(None)], learning_rate=4e-3)
    train(masked_lm, feature_frames, tmp_path / "new", [CrashAt(None)], learning_rate=4e-3)
    assert result(crashed) == result(tmp_path / "new")


@pytest.mark.slow  # and in tests/chaos
def test_damaged_space__is_pruned_again(masked_lm, feature_frames, crashed, whole, caplog):
    path = crashed / "state/sample_3_space.safetensors"
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with caplog.at_level("WARNING"):
        train(masked_lm, feature_frames, crashed, [CrashAt(None)])
    assert "sample_3_space.safetensors is damaged: pruning again" in caplog.text
    assert result(whole(False)) == result(crashed)


def report_of(directory: Path) -> str:
    """Without where it is, and who trained what."""
    report = json.loads((directory / "seeds/seed_report.json").read_text())
    for run in report["runs"]:
        for name in ("output_dir", "trained", "used_cache"):
            del run[name]
    return json.dumps(report)


@pytest.mark.parametrize("damaged", [False, True])
def test_finished_seed__is_compared_by_the_score_it_had_and_trained_again_where_it_is_damaged(
    masked_lm, feature_frames, tmp_path, whole, monkeypatch, damaged, caplog
):
    """Fails if the score depends on what a process has computed before: a near tie would select another seed."""
    plain = SeedTraining._result

    def interrupted(*_: Any) -> Any:
        raise Crash

    monkeypatch.setattr(SeedTraining, "_result", interrupted)  # trained, and not yet compared
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path, [CrashAt(None)])
    monkeypatch.setattr(SeedTraining, "_result", plain)
    if damaged:
        file = tmp_path / "seeds/seed_3/model.safetensors"
        content = bytearray(file.read_bytes())
        content[-8] ^= 4
        file.unlink()
        file.write_bytes(content)
    with caplog.at_level("WARNING"):
        train(masked_lm, feature_frames, tmp_path, [CrashAt(None)])
    assert ("seed 3 is trained again" in caplog.text) == damaged
    assert report_of(tmp_path) == report_of(whole(False))
    assert result(tmp_path) == result(whole(False))


def test_other_callbacks__go_on_with_what_is_theirs(masked_lm, feature_frames, tmp_path, caplog):
    """Fails if callbacks are matched by their place: one that is new, gone or moved ends the run."""
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path / "a", [CrashAt(9), DrawsNumbers()], max_seeds=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with caplog.at_level("WARNING"):
        train(masked_lm, feature_frames, tmp_path / "a", [DrawsNumbers(), EarlyStoppingCallback(99)], max_seeds=1)
    assert "not there any more" not in caplog.text
    assert len(json.loads((tmp_path / "a/drawn.json").read_text())) == 17
    with caplog.at_level("WARNING"):
        train(masked_lm, feature_frames, tmp_path / "b", max_seeds=1)
    assert "callbacks that are not there any more: DrawsNumbers" in caplog.text


def test_metrics__of_a_run_that_begins_again_have_each_step_once(masked_lm, feature_frames, tmp_path):
    with pytest.raises(Crash):
        train(masked_lm, feature_frames, tmp_path, [CrashAt(2)], max_seeds=1)
    train(masked_lm, feature_frames, tmp_path, max_seeds=1)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row["step"] for row in rows if "correlation" in row and "step" in row]
    assert evaluated == [0, 4, 8, 12, 16, 17]


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("evil", ["a function", "a name of torch's"])
def test_state__that_would_run_code_is_passed_over(
    masked_lm: Path, feature_frames: dict[str, Any], tmp_path: Path, evil: str, caplog: pytest.LogCaptureFixture
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
    assert size != (state / name).stat().st_size
    sign(state)
    with caplog.at_level("WARNING"):
        train(masked_lm, feature_frames, tmp_path / "run", [CrashAt(None)], max_seeds=2)
    assert "step_00000005 is passed over: tensors cannot be read" in caplog.text
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
