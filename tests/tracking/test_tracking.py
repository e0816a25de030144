"""What leaves a training while it runs. The W&B client is the real one; its service is a stand-in on loopback that
answers, refuses, stalls, limits or fails."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_wandb import API_KEY, FakeWandb, read_offline
from packaging.requirements import Requirement
from packaging.version import Version

from gradiend_dist import TrainingArguments, UserError
from gradiend_dist.distributed import peers
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.interrupt import Preempted
from gradiend_dist.errors import NotFinite
from gradiend_dist.report.records import read_rows
from gradiend_dist.storage.layout import METRICS
from gradiend_dist.tracking import tracking, wandb_page
from gradiend_dist.tracking.tracking import Background, TensorBoardPage, Tracking
from gradiend_dist.tracking.wandb_page import WandBPage


def tracked(directory: Path, **arguments: Any) -> Tracking:
    args = TrainingArguments(experiment_dir=str(directory), **arguments)
    return Tracking(args, Comm(), directory, "run-id", {"model": "m", "hf_token": "never shown", "n": 3})


def rows(directory: Path, name: str = METRICS) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "time"} for row in read_rows(directory / name)]


# --- metrics.jsonl


def test_journal__has_every_row_at_once_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    with tracked(tmp_path) as run:
        run.begin([0], 0)
        run.row(0, 1, {"loss": 0.5, "grad_norm": math.nan})
        assert rows(tmp_path) == [{"step": 1, "seed": 0, "loss": 0.5, "grad_norm": None}]
        run.alert(0, 1, "loss_flat", "text")
        run.seed_summary(0, {"converged": True})
    assert rows(tmp_path)[1:] == [
        {"step": 1, "seed": 0, "alert": "loss_flat", "text": "text"},
        {"seed": 0, "converged": True},
    ]


def test_journal__goes_back_to_the_state_that_a_run_goes_on_from(tmp_path: Path) -> None:
    """Fails if a killed run's later rows stay, or those of finished seeds go."""
    with tracked(tmp_path) as run:
        run.begin([0], 0)
        run.row(0, 5, {"loss": 1.0})
        run.seed_summary(0, {"converged": True})
        run.begin([1], 0)
        for step in (1, 2, 3):
            run.row(1, step, {"loss": float(step)})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "seed": 1, "lo')  # killed in the middle of a line
    with tracked(tmp_path) as run:
        run.reuse([0])
        run.begin([1], 2)
        run.row(1, 3, {"loss": 3.0})
    assert [(row["seed"], row.get("step")) for row in rows(tmp_path)] == [(0, 5), (0, None), (1, 1), (1, 2), (1, 3)]
    with tracked(tmp_path) as run:  # another run in the same place
        run.begin([0], 0)
    assert rows(tmp_path) == []


def test_journal__of_one_seed_of_an_array_is_a_file_of_its_own_until_they_are_collected(tmp_path: Path) -> None:
    for seed in (1, 0):
        with tracked(tmp_path, only_seed=seed) as run:
            run.begin([seed], 0)
            run.row(seed, 1, {"loss": float(seed)})
    with tracked(tmp_path, select_only=True) as run:
        run.reuse([0, 1])
        run.summary({"best_seed": 1}, [{"seed": 0, "selected": False}], {}, tmp_path)
    assert rows(tmp_path) == [
        {"step": 1, "seed": 0, "loss": 0.0},
        {"step": 1, "seed": 1, "loss": 1.0},
        {"best_seed": 1},
    ]


def test_other_ranks__write_nothing(tmp_path: Path) -> None:
    args = TrainingArguments(experiment_dir=str(tmp_path / "run"), report_to=["wandb"])
    with Tracking(args, Comm(rank=1, world_size=2), tmp_path / "run", "id", {}) as run:
        run.begin([0], 0)
        run.row(0, 1, {"loss": 1.0})
        run.alert(0, 1, "kind", "text")
        run.seed_summary(0, {})
        run.summary({}, [], {}, tmp_path)
    assert not (tmp_path / "run").exists()


def test_full_disk__ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with tracked(tmp_path) as run:
        run.begin([0], 0)
        (tmp_path / METRICS).mkdir()
        with pytest.raises(UserError, match="cannot be written"):
            run.row(0, 1, {"loss": 1.0})


# --- behind the queue


class Slow:
    """A page that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.go, self.taken = threading.Event(), []

    def row(self, values: dict[str, Any]) -> None:
        self.go.wait(30)
        self.taken.append(values)

    def finish(self, outcome: str) -> None:
        self.taken.append(outcome)


def test_queue__is_bounded_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a slow service slows the training down, fills the memory, or is complained of more than once."""
    monkeypatch.setattr(tracking, "QUEUE_ROWS", 20)
    page = Slow()
    background = Background("slow", lambda: page, (OSError,))  # type: ignore[arg-type, return-value]
    for number in range(1000):
        background.do(lambda page, number=number: page.row({"step": number}))  # type: ignore[misc]
    assert background._jobs.qsize() <= 20
    assert [record.message for record in caplog.records if "slow" in record.message] == [
        "slow: 20 rows wait to be sent, new ones are left out there; training goes on, metrics.jsonl has every row"
    ]
    page.go.set()
    background.finish("finished", 20.0)
    assert page.taken[0] == {"step": 0} and page.taken[-1] == "finished" and len(page.taken) <= 22


def test_page__that_fails_is_told_once_without_a_secret(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)

    def fail() -> Any:
        raise OSError(f"refused for {API_KEY}")

    background = Background("W&B", fail, (OSError,))
    background.do(lambda page: page.row({}))
    background.finish("finished", 5.0)
    (record,) = caplog.records
    assert "refused for ***; training goes on" in record.message


def test_end__waits_no_longer_than_it_says(caplog: pytest.LogCaptureFixture) -> None:
    page, abandoned = Slow(), []
    background = Background("slow", lambda: page, (OSError,), lambda: abandoned.append(page.go.set()))  # type: ignore[arg-type, func-returns-value, return-value]
    background.do(lambda page: page.row({}))
    background.finish("finished", 0.2)
    assert abandoned and "were not taken within" in caplog.text
    assert not background._thread.is_alive()


# --- W&B


@pytest.fixture
def wandb_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr("gradiend_dist.tracking.wandb_page.OPEN_SECONDS", 3.0)
    monkeypatch.setattr("gradiend_dist.tracking.wandb_page.ANSWER_SECONDS", 1.0)
    monkeypatch.setattr("gradiend_dist.tracking.wandb_page.FINISH_SECONDS", 3.0)
    monkeypatch.setattr(tracking, "LAST_SECONDS", 12.0)
    return monkeypatch


def train_a_little(run: Tracking, seeds: tuple[int, ...] = (0, 1)) -> None:
    """The calls of a short run."""
    for seed in seeds:
        run.begin([seed], 0)
        for step in range(1, 51):
            run.row(seed, step, {"loss": 1.0 / step, "mean_encoding/M": 0.5})
        run.alert(seed, 50, "loss_flat", "raise learning_rate")
        run.seed_summary(seed, {"converged": True, "best_step": 50})
    table = [{"seed": seed, "converged": True, "selected": seed == 0} for seed in seeds]
    run.summary({"best_seed": 0, "converged": True}, table, {}, Path("nowhere"))


def as_wandb(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl under the names that they have in one W&B run."""
    return [
        {"step": row["step"], **{f"seed_{row['seed']}/{k}": v for k, v in row.items() if k not in ("step", "seed")}}
        for row in found
        if "step" in row and "alert" not in row
    ]


def history(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Logged rows without the client's own fields, alerts and tables."""
    plain = [{k: v for k, v in row.items() if not k.startswith("_")} for row in recorded]
    return [row for row in plain if any(k.endswith("loss") for k in row)]


def offline_files(directory: Path) -> list[Path]:
    return sorted((directory / "wandb").glob("offline-run-*/*.wandb"))


def test_offline_run__read_back_from_its_file_is_metrics_jsonl(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wandb_environment.setenv("WANDB_MODE", "offline")
    with tracked(tmp_path, report_to=["wandb"], run_name="name", wandb_tags=["a"], wandb_group="g") as run:
        train_a_little(run)
    (file,) = offline_files(tmp_path)
    found = read_offline(file)
    assert history(found.rows) == as_wandb(rows(tmp_path))
    assert len(history(found.rows)) == 100
    assert (found.run_id, found.project) == ("run-id", "gradiend_dist")
    assert found.config["model"] == "m" and found.config["hf_token"] == "***"
    assert found.summary["best_seed"] == 0 and found.summary["seed_1/best_step"] == 50
    assert [alert.title for alert in found.alerts] == ["loss flat", "loss flat"]
    assert found.exit_code == 0
    assert b"never shown" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert capfd.readouterr().err == "", "the client says nothing of its own"


def test_online_run__arrives_and_an_interrupted_one_is_continued(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch
) -> None:
    """Fails if a run that goes on becomes a second one on the page."""
    with FakeWandb() as service:
        for name, value in service.environment.items():
            wandb_environment.setenv(name, value)
        with pytest.raises(Preempted), tracked(tmp_path, report_to=["wandb"]) as run:
            run.begin([0], 0)
            run.row(0, 1, {"loss": 1.0})
            raise Preempted(15, 1)
        with tracked(tmp_path, report_to=["wandb"], wandb_project="elsewhere") as run:
            run.begin([0], 1)
            run.row(0, 2, {"loss": 0.5})
        assert list(service.runs) == ["run-id"]
        (found,) = service.runs.values()
        assert history(found.history) == as_wandb(rows(tmp_path))
        assert found.resumes == 1 and found.exit_code == 0
    assert len(list((tmp_path / "wandb").glob("run-*/*.synced"))) == 2, "nothing is left for sync_wandb.sh"


@pytest.mark.parametrize("mode", ["refuse", "stall", "limit", "error"])
def test_service__that_fails_costs_no_step_and_no_row(
    mode: Any, tmp_path: Path, wandb_environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is recorded offline, complete, under the same id, and told once. All of it was trained before the service
    was so much as asked: nothing in it waits."""
    trained = threading.Event()
    open_page = WandBPage.open

    def later(*arguments: Any) -> WandBPage:
        assert trained.wait(60), "the training waited for its page"
        return open_page(*arguments)

    wandb_environment.setattr(WandBPage, "open", later)
    with FakeWandb(mode) as service:
        for name, value in service.environment.items():
            wandb_environment.setenv(name, value)
        with tracked(tmp_path, report_to=["wandb"]) as run:
            train_a_little(run)
            trained.set()
    (file,) = offline_files(tmp_path)
    assert history(read_offline(file).rows) == as_wandb(rows(tmp_path))
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING" and "W&B" in record.message]
    assert "recorded offline" in warning.message and API_KEY not in caplog.text


def test_service__that_goes_silent_in_the_middle_does_not_hold_the_end(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a run ends late, or without its rows on disk."""
    wandb_environment.setattr(tracking, "LAST_SECONDS", 4.0)
    with FakeWandb() as service:
        for name, value in service.environment.items():
            wandb_environment.setenv(name, value)
        with tracked(tmp_path, report_to=["wandb"]) as run:
            run.begin([0], 0)
            deadline = time.monotonic() + 20
            while not service.runs and time.monotonic() < deadline:
                time.sleep(0.05)
            service.mode = "stall"
            train_a_little(run, (0,))
        assert all(not thread.name.startswith("tracking") for thread in threading.enumerate())
    (file,) = (tmp_path / "wandb").glob("run-*/*.wandb")
    assert history(read_offline(file).rows) == as_wandb(rows(tmp_path))
    assert not file.with_name(f"{file.name}.synced").exists(), "sync_wandb.sh finds it"
    assert caplog.text.count("training goes on") == 1


def test_seeds__as_grouped_runs_have_plain_names_and_their_own_score(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch
) -> None:
    wandb_environment.setenv("WANDB_MODE", "offline")
    with tracked(tmp_path, report_to=["wandb"], wandb_seed_runs="grouped") as run:
        for seed, score in ((0, 0.9), (1, 0.7)):
            run.begin([seed], 0)
            run.row(seed, 1, {"loss": 0.25})
            run.seed_summary(seed, {"selection_score": score})
        table = [{"seed": s, "selection_score": x, "selected": s == 0} for s, x in ((0, 0.9), (1, 0.7))]
        run.summary({"best_seed": 0, "selection_score": 0.9}, table, {}, tmp_path)
    found = {offline.run_id: offline for offline in map(read_offline, offline_files(tmp_path))}
    assert sorted(found) == ["run-id-0", "run-id-1"]
    assert history(found["run-id-1"].rows) == [{"step": 1, "loss": 0.25}]
    second = found["run-id-1"].summary
    assert (second["selection_score"], second["selected"], second["best_seed"]) == (0.7, False, 0)


def test_grouped_runs__without_a_network_are_all_recorded_offline_with_one_warning(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if the fall-back of one seed's run ends that of another, or if a seed that is not needed breaks the end."""
    with FakeWandb("refuse") as service:
        for name, value in service.environment.items():
            wandb_environment.setenv(name, value)
        with tracked(tmp_path, report_to=["wandb"], wandb_seed_runs="grouped") as run:
            for seed in (0, 1):
                run.begin([seed], 0)
                run.row(seed, 1, {"loss": float(seed)})
            run.summary({"best_seed": 0}, [{"seed": 0, "selected": True}], {}, tmp_path)  # seed 1 was dropped
    found = {offline.run_id: offline for offline in map(read_offline, offline_files(tmp_path))}
    assert sorted(found) == ["run-id-0", "run-id-1"]
    for seed in (0, 1):
        offline = found[f"run-id-{seed}"]
        assert history(offline.rows) == [{"step": 1, "loss": seed}]
        assert (offline.summary["selected"], offline.exit_code) == (seed == 0, 0)
    assert caplog.text.count("training goes on") == 1


def test_close__does_not_leave_the_program_where_the_helper_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave() -> None:
        raise SystemExit(-9)

    monkeypatch.setattr("wandb.teardown", leave)
    wandb_page.close()


@pytest.mark.parametrize("outcome", ["preempted", "failed", "lost"])
def test_end__that_comes_early_is_told_before_a_launcher_loses_patience(outcome: str) -> None:
    """A launcher kills rank 0 after 30 s; ranks that lost one wait 3 s for each other's word."""
    limit = tracking.LAST_SECONDS_EARLY[outcome] + tracking.ABANDON_SECONDS
    assert limit < (peers.LAST_WORDS_SECONDS if outcome == "lost" else 15.0)


def test_model__is_an_artifact_on_request_and_plots_are_pictures(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "training.json").write_text('{"training_args": {"api_key": "never shown"}}')
    picture = tmp_path / "plot.png"
    pytest.importorskip("matplotlib.image").imsave(picture, [[0.0, 1.0]])
    with FakeWandb() as service:
        for name, value in service.environment.items():
            wandb_environment.setenv(name, value)
        with tracked(tmp_path, report_to=["wandb"], wandb_log_model=True) as run:
            run.begin([0], 0)
            picture_of = {"plots/training_convergence": picture}
            run.summary({"best_seed": 0}, [{"seed": 0}], picture_of, tmp_path / "model")
        assert "gradiend-run-id" in str(service.artifacts)
        assert b"never shown" not in b"".join(service.bodies), "the record of the model is cleaned"
        (found,) = service.runs.values()
        assert "plots/training_convergence" in str(found.history)


@pytest.mark.parametrize(
    ("error", "code", "alerts"),
    [
        (NotFinite("The loss is not finite", seed=0, step=3), 1, ["not finite"]),
        (UserError("something else"), 1, []),
        (Preempted(15, 3), 1, []),
    ],
)
def test_end__of_the_tracked_run_is_that_of_the_training(
    tmp_path: Path, wandb_environment: pytest.MonkeyPatch, error: BaseException, code: int, alerts: list[str]
) -> None:
    wandb_environment.setenv("WANDB_MODE", "offline")
    with pytest.raises(type(error)), tracked(tmp_path, report_to=["wandb"]) as run:
        run.begin([0], 0)
        raise error
    found = read_offline(offline_files(tmp_path)[0])
    assert found.exit_code == code and [alert.title for alert in found.alerts] == alerts


# --- TensorBoard


def test_tensorboard__shows_the_rows_of_metrics_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracked(tmp_path, report_to=["tensorboard"]) as run:
        train_a_little(run)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("seed_1/loss")]
    logged = [(row["step"], row["loss"]) for row in rows(tmp_path) if row.get("seed") == 1 and "loss" in row]
    assert [step for step, _ in shown] == [step for step, _ in logged] == list(range(1, 51))
    assert [value for _, value in shown] == pytest.approx([value for _, value in logged])
    assert "alert/loss_flat/text_summary" in events.Tags()["tensors"]


def test_tensorboard__shows_a_plot_with_transparency(tmp_path: Path) -> None:
    """Fails if all four channels of a PNG are sent: the image writer takes three."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    image = pytest.importorskip("matplotlib.image", reason="the extra plot is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    image.imsave(tmp_path / "plot.png", np.zeros((4, 5, 4)))
    page = TensorBoardPage(tmp_path, {})
    page.images({"plots/one": tmp_path / "plot.png"})
    page.finish("finished")
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [event for name in found.Tags()["images"] for event in found.Images(name)]
    assert [(event.height, event.width) for event in shown] == [(4, 5)]


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"report_to": ["wandbb"]}, "report_to='wandbb' is not known: choose one of wandb, tensorboard, none"),
        ({"wandb_seed_runs": "two"}, "wandb_seed_runs='two' is not known"),
        ({"wandb_log_model": True}, "report_to does not name: pass report_to wandb"),
        ({"only_seed": 7}, "only_seed=7 is none of the seeds 0 to 2"),
        ({"only_seed": 1, "select_only": True}, "pass only one of them"),
        ({"select_only": True, "max_seeds": 1}, "max_seeds=1: raise max_seeds"),
        ({"select_only": True, "experiment_dir": None}, "which is not set: pass it"),
    ],
)
def test_arguments__that_cannot_be_honoured_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        TrainingArguments(**{"experiment_dir": "e", **arguments})
    assert says in str(error.value)


def test_read_rows__of_nothing_is_nothing(tmp_path: Path) -> None:
    assert read_rows(tmp_path / METRICS) == []
    (tmp_path / METRICS).write_text(json.dumps([1]) + "\n\n{}\n")
    assert read_rows(tmp_path / METRICS) == [{}]


def test_wandb__has_the_private_names_that_we_use() -> None:
    """Fails if a new version of the client, beyond the bound in pyproject.toml, has moved an exception."""
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    assert issubclass(WandbApiFailedError, Exception)
    assert all(issubclass(error, Exception) for error in wandb_page.errors())
    bound = re.search(r'"(wandb>=[^"]*)"', (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert bound is not None
    assert Version(importlib.metadata.version("wandb")) in Requirement(bound[1]).specifier
