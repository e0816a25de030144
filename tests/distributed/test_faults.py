"""Ranks that die, hang, fail or are told to stop, at many points of a run: all processes end in bounded time with one
clear message, nothing that was promoted is damaged, and the same command goes on to the same result, bit for bit."""

from __future__ import annotations

import importlib
import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gradiend_dist import demo

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "accelerate_configs"
# A launch takes 10 s on an idle machine; a rank that does not answer is given up after ddp_timeout.
LIMIT = 150.0
ANSWER_WITHIN = 30
# Between two steps, where a test must act there; ranks look for requests, and finish saving, every half second.
PAUSE = 0.4


@pytest.fixture(scope="module")
def run_file(masked_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two seeds, 14 steps each, over 1 % more than a tenth of a small model; state after every fourth step."""
    root = tmp_path_factory.mktemp("faults")
    data = root / "data"
    data.mkdir()
    for name, frame in demo.feature_data().items():
        frame.to_csv(data / f"{name}.csv", index=False)
    values = {
        "model": str(masked_lm),
        "data": str(data),
        "target_classes": ["M", "F"],
        "pre_prune_config": {"n_samples": 4, "topk": 0.11, "source": "diff"},
        "train_batch_size": 5,
        "train_max_size": 33,
        "encoder_eval_train_max_size": 4,
        "encoder_eval_max_size": 4,
        "max_steps": 14,
        "eval_steps": 3,
        "save_steps": 4,
        "learning_rate": 0.01,
        "initialization": "random",  # a better checkpoint is written while it trains, where the faults are
        "lr_scheduler_type": "linear",
        "max_seeds": 2,
        "min_convergent_seeds": None,
        "logging_steps": 1,
        "ddp_timeout": ANSWER_WITHIN,
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class Launched:
    """A real `accelerate launch` of two gloo ranks, in a session of its own."""

    def __init__(
        self,
        run_file: Path,
        output: Path,
        fault: dict[str, Any] | None,
        ranks: int = 2,
        config: str = "cpu_2",
        pause: float = 0.0,
        script: bool = False,
    ) -> None:
        self.output, self.log = output, output.with_suffix(".log")
        self.begun = self.log.stat().st_size if self.log.exists() else 0  # behind what earlier launches have said
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["ACCELERATE_TORCH_DEVICE" if "zero" in config else "ACCELERATE_USE_CPU"] = (
            "cpu" if "zero" in config else "true"
        )
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), environment.get("PYTHONPATH", "")])
        what = ["-m", "gradiend_dist.train"]
        if fault is not None or pause:
            environment |= {"FAULT": json.dumps(fault), "PAUSE": str(pause)}
            what = [str(HERE / "faulty_train.py")]
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        command += ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(ranks), *what]
        if script:
            environment["ACCELERATE"] = str(Path(sys.executable).parent / "accelerate")
            command = [str(CONFIGS.parent / "launch" / "single_node.sh"), "--engine", config, "--"]
        command += ["--config", str(run_file), "--experiment_dir", str(output)]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=output.parent
            )

    @property
    def text(self) -> str:
        return self.log.read_bytes()[self.begun :].decode()

    def wait(self) -> int:
        """The exit code; the whole session has ended with the launcher, or the test fails."""
        try:
            code = self.process.wait(LIMIT)
        finally:
            orphans = self.members()
            deadline = time.monotonic() + 15
            while orphans and time.monotonic() < deadline:
                time.sleep(0.2)
                orphans = self.members()
            for process in orphans:
                os.kill(process, signal.SIGKILL)
        assert not orphans, f"processes outlived their launcher:\n{self.text}"
        return code

    def members(self) -> list[int]:
        """All that works on this output: torch gives each rank a session of its own."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode().split("\0")
                except (OSError, UnicodeDecodeError):
                    continue
                if str(self.output) in words:
                    found.append(int(entry.name))
        return found

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not re.search(pattern, self.text):
            assert self.process.poll() is None, f"ended before {pattern!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"{pattern!r} did not come:\n{self.text}"
            time.sleep(0.05)


def result_of(output: Path) -> dict[str, Any]:
    stats = json.loads((output / "training_stats.json").read_text())
    for seed in stats["seeds"].values():
        del seed["time"]
    return {
        "stats": {name: stats[name] for name in ("best_seed", "seeds")},
        "weights": load_file(output / "model" / "model.safetensors"),
        "indices": load_file(output / "model" / "mapping_indices.safetensors"),
        "report": re.sub(re.escape(str(output)), "", (output / "seeds" / "seed_report.json").read_text()),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("weights", "indices"):
        assert found[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            assert torch.equal(found[kind][name], tensor), f"{kind} {name}"
    assert found["stats"] == expected["stats"]
    # A seed that was finished before the kill counts as trained earlier; all else is the same.
    without_origin = re.compile(r'"(trained|used_cache)": (true|false)')
    assert without_origin.sub("", found["report"]) == without_origin.sub("", expected["report"])


@pytest.fixture(scope="module")
def expected(run_file: Path) -> dict[str, Any]:
    """What the run gives without any fault, on two ranks."""
    output = run_file.parent / "undisturbed"
    launched = Launched(run_file, output, None)
    assert launched.wait() == 0, launched.text
    assert not (output / "state").exists(), "a finished run leaves no state behind"
    return result_of(output)


STEP = "gradiend_dist.training.loop:TrainingLoop._step"
STORED = "gradiend_dist.storage.weight_file:write_pieces"
NOT_FINITE = "gradiend_dist.engines.sliced:SlicedEngine.step"
FULL_DISKS = (STORED, "gradiend_dist.training.state:write_json")


def fault(at: str, call: int, rank: int = 1, when: str = "before", do: str = "kill") -> dict[str, Any]:
    return {"rank": rank, "at": at, "call": call, "when": when, "do": do}


POINTS = {
    "pre-pruning": fault("gradiend_dist.gradients.base:BaseGradients.compute", 2),
    "after pre-pruning": fault("gradiend_dist.training.unfinished_run:PrunedSpaces.keep", 1, rank=0, when="after"),
    "evaluation at step 0": fault("gradiend_dist.evaluation.encoder:encode_items", 1),
    "middle of an epoch": fault(STEP, 7),
    "before any state": fault(STEP, 3, rank=0),
    "while a state is staged": fault("gradiend_dist.training.state:start_saving", 2),
    "before a state is complete": fault("gradiend_dist.training.state:StateKeeper._complete", 2, rank=0),
    "after a state is complete": fault("gradiend_dist.training.state:StateKeeper._complete", 1, rank=0, when="after"),
    "while the best is written": fault(STORED, 2),
    "before the best is in place": fault("gradiend_dist.storage.model_dir:replace_directory", 2, rank=0),
    "between two renames": fault("gradiend_dist.storage.files:Path.rename", 3, rank=0, when="after"),
    "second seed": fault(STEP, 24),
    "seed trained, not marked": fault("gradiend_dist.training.state:StateKeeper.finish_seeds", 1, rank=0),
    "promoted, not reported": fault("gradiend_dist.training.promotion:promote", 1, rank=0, when="after"),
    "promoted, not cleared": fault("gradiend_dist.training.promotion:strip_models", 1, rank=0, when="after"),
    "before the state is removed": fault("gradiend_dist.training.state:StateKeeper.close", 1, rank=0),
}


def test_points__are_functions_of_the_package():
    """The runs that are killed there are slow: a function that was renamed shows here."""
    places = [*(point["at"] for point in POINTS.values()), STEP, NOT_FINITE, *FULL_DISKS]
    for module, _, path in (place.partition(":") for place in places):
        assert callable(operator.attrgetter(path)(importlib.import_module(module)))


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_kill__the_same_command_gives_the_same_result(point, run_file, expected, tmp_path):
    output = tmp_path / "run"
    first = Launched(run_file, output, POINTS[point])
    assert first.wait() != 0, first.text
    assert "]: Traceback" not in first.text, first.text  # of a rank; the launcher has one of its own
    again = Launched(run_file, output, None)
    assert again.wait() == 0, again.text
    assert_same(result_of(output), expected)
    assert not list(output.rglob(".*")), "nothing half-written is left"


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("gradiend-dist train:")]
    assert len(lines) == 1, text
    return lines[0]


def test_everything__happens_to_one_run(run_file, expected, tmp_path):
    """NaN on one rank, a full disk, a killed rank, a signal, then peace; and from the state after the signal also with
    another number of ranks. Each ends with its sentence, and the result is that of the undisturbed run. One run for
    all, because the start of ranks is what takes time; below, and slow, each has a run of its own."""
    output, other = tmp_path / "run", tmp_path / "other"
    for point, sentence in (
        (fault(NOT_FINITE, 6, rank=0, do="nan"), "not finite at step 6 of seed 0"),
        (fault(STORED, 2, do="full"), "No space left on device"),
        (fault(STEP, 7), "rank 1 is gone or does not answer"),
    ):
        launched = Launched(run_file, output, point)
        assert launched.wait() != 0
        assert sentence in one_line(launched.text)
        assert "]: Traceback" not in launched.text, launched.text  # of a rank; the launcher has one of its own
    launched = Launched(run_file, output, None, pause=PAUSE)
    launched.wait_for(r"seed 0 step 12/")
    os.kill(launched.process.pid, signal.SIGTERM)
    launched.wait()
    step = saved_step(launched)
    shutil.copytree(output, other)
    again = Launched(run_file, output, None)
    assert again.wait() == 0, again.text
    assert f"going on after step {step}" in again.text
    assert_same(result_of(output), expected)
    assert not list(output.rglob(".*")), "nothing half-written is left"
    alone = Launched(run_file, other, None, ranks=1)
    assert alone.wait() == 0, alone.text
    assert f"going on after step {step}" in alone.text
    assert close(result_of(other), expected) < 2e-4  # see test_other_world_size


def saved_step(launched: Launched) -> str:
    found = re.search(r"the state after step (\d+) is saved; the same command goes on", one_line(launched.text))
    assert found is not None, launched.text
    return found[1]


@pytest.mark.slow
def test_killed_rank__is_named(run_file, tmp_path):
    launched = Launched(run_file, tmp_path / "run", fault(STEP, 5))
    assert launched.wait() != 0
    assert "rank 1 is gone or does not answer" in one_line(launched.text)


@pytest.mark.slow
def test_silent_rank__is_given_up_after_the_timeout(run_file, tmp_path):
    start = time.monotonic()
    launched = Launched(run_file, tmp_path / "run", fault(STEP, 5, do="stop"))
    assert launched.wait() != 0
    assert "rank 1 is gone or does not answer" in one_line(launched.text)
    assert time.monotonic() - start < ANSWER_WITHIN + 100


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_not_a_number__ends_the_run_with_the_step_and_the_rows(rank, run_file, tmp_path):
    launched = Launched(run_file, tmp_path / "run", fault(NOT_FINITE, 6, rank, do="nan"))
    assert launched.wait() != 0
    line = one_line(launched.text)
    assert "not finite at step 6 of seed 0" in line and "rows" in line


@pytest.mark.slow
def test_unexpected_exception__is_shown_once_and_ends_all_ranks(run_file, tmp_path):
    launched = Launched(run_file, tmp_path / "run", fault(STEP, 6, do="raise"))
    assert launched.wait() != 0
    assert launched.text.count("RuntimeError: something that nobody expects") == 1
    assert "gradiend-dist train:" not in launched.text


@pytest.mark.slow
@pytest.mark.parametrize("at", FULL_DISKS)
def test_full_disk__is_one_sentence_and_the_run_goes_on_later(at, run_file, expected, tmp_path):
    rank = 1 if at == STORED else 0
    output = tmp_path / "run"
    launched = Launched(run_file, output, fault(at, 2, rank, do="full"))
    assert launched.wait() != 0
    assert "No space left on device" in one_line(launched.text)
    again = Launched(run_file, output, None)
    assert again.wait() == 0, again.text
    assert_same(result_of(output), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "seed", "code"),
    [
        (signal.SIGTERM, 0, None),
        # These end the launcher, which does not know them: the ranks have to save without it and its store.
        (signal.SIGUSR1, 1, -signal.SIGUSR1),
        (signal.SIGUSR2, 0, -signal.SIGUSR2),
        (signal.SIGKILL, 0, -signal.SIGKILL),
        (signal.SIGINT, 1, None),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_signal_to_the_launcher__saves_and_the_same_command_goes_on(number, seed, code, run_file, expected, tmp_path):
    output = tmp_path / "run"
    launched = Launched(run_file, output, None, pause=PAUSE)
    launched.wait_for(rf"seed {seed} step 9/")
    os.kill(launched.process.pid, number)
    ended = launched.wait()
    assert code is None or ended == code
    step = saved_step(launched)
    again = Launched(run_file, output, None)
    assert again.wait() == 0, again.text
    assert f"going on after step {step}" in again.text
    assert_same(result_of(output), expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_signal_to_single_node_sh__is_handed_on_to_every_rank(number, run_file, tmp_path):
    values = yaml.safe_load(run_file.read_text())
    long_run = tmp_path / "long.yaml"
    long_run.write_text(yaml.safe_dump({**values, "max_steps": 100_000, "eval_steps": 100_000}))
    launched = Launched(long_run, tmp_path / "run", None, script=True)
    launched.wait_for(r"seed 0 step 9/")
    os.kill(launched.process.pid, number)
    launched.wait()
    assert f"{number.name}: the state after step" in one_line(launched.text)


@pytest.fixture
def interrupted(run_file: Path, tmp_path: Path) -> Iterator[Callable[[], Launched]]:
    """A run that was killed at its twelfth step, and how to go on with it."""
    output = tmp_path / "run"
    killed = Launched(run_file, output, fault(STEP, 13), pause=PAUSE)
    assert killed.wait() != 0
    assert len(list((output / "state").glob("step_*"))) == 2
    yield lambda: Launched(run_file, output, None)


@pytest.mark.slow
def test_truncated_state__the_one_before_is_taken(interrupted, expected, tmp_path):
    newest = max((tmp_path / "run" / "state").glob("step_*"))
    file = next((newest / "tensors").glob("__1_*"))
    os.truncate(file, file.stat().st_size // 2)
    launched = interrupted()
    assert launched.wait() == 0, launched.text
    assert "is passed over" in launched.text and "going on after step 4" in launched.text
    assert_same(result_of(tmp_path / "run"), expected)


@pytest.mark.slow
def test_changed_argument__is_named_and_nothing_is_lost(run_file, interrupted, expected, tmp_path):
    values = yaml.safe_load(run_file.read_text())
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump({**values, "learning_rate": 0.02}))
    launched = Launched(changed, tmp_path / "run", None)
    assert launched.wait() != 0
    line = one_line(launched.text)
    assert "learning_rate=0.01, now it is 0.02" in line and "--resume false" in line
    launched = interrupted()
    assert launched.wait() == 0, launched.text
    assert_same(result_of(tmp_path / "run"), expected)


def close(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of the weights, after everything that must be equal is."""
    assert found["stats"]["best_seed"] == expected["stats"]["best_seed"]
    for name, tensor in expected["indices"].items():
        assert torch.equal(found["indices"][name], tensor)
    return max((found["weights"][name] - tensor).abs().max().item() for name, tensor in expected["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2), (2, 3)])
def test_other_world_size__goes_on_to_the_same_result(before, after, run_file, expected, tmp_path):
    """The tolerance is that of float32 sums in another order, which Adam's first steps carry into single weights."""
    output = tmp_path / "run"
    point = fault(STEP, 12, rank=0)
    killed = Launched(run_file, output, point, ranks=before, pause=PAUSE)
    assert killed.wait() != 0
    launched = Launched(run_file, output, None, ranks=after)
    assert launched.wait() == 0, launched.text
    assert "going on after step 8" in launched.text
    largest = close(result_of(output), expected)
    print(f"{before} -> {after} ranks: largest difference of the weights {largest:.2e}")
    assert largest < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2", "zero1", "zero3"])
def test_kill__holds_for_every_engine(config, run_file, tmp_path):
    """Each against its own uninterrupted run: bit for bit."""
    undisturbed = Launched(run_file, tmp_path / "undisturbed", None, config=config)
    assert undisturbed.wait() == 0, undisturbed.text
    point = fault(STEP, 26)
    killed = Launched(run_file, tmp_path / "run", point, config=config, pause=PAUSE)
    assert killed.wait() != 0
    assert "rank 1 is gone or does not answer" in one_line(killed.text)
    again = Launched(run_file, tmp_path / "run", None, config=config)
    assert again.wait() == 0, again.text
    assert "going on after step 8" in again.text
    assert_same(result_of(tmp_path / "run"), result_of(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_zero__another_number_of_ranks_is_refused_with_the_remedy(run_file, tmp_path):
    point = fault(STEP, 12)
    assert Launched(run_file, tmp_path / "run", point, config="zero1", pause=PAUSE).wait() != 0
    launched = Launched(run_file, tmp_path / "run", None, ranks=3, config="zero1")
    assert launched.wait() != 0
    assert "2" in one_line(launched.text) and "3" in one_line(launched.text)
