"""A run's page in W&B, through Accelerate's tracker: opened in bounded time, offline where nobody answers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from accelerate.tracking import WandBTracker

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.storage.files import read_json
from gradiend_dist.storage.layout import TRAINING
from gradiend_dist.storage.provenance import without_secrets

logger = logging.getLogger(__name__)

PROJECT = "gradiend_dist"

# All that a service may keep waiting for happens in a thread of its own: these bound the end of a run, not its steps.
OPEN_SECONDS = 15.0

ANSWER_SECONDS = 5.0

FINISH_SECONDS = 15.0

# A model is larger than rows.
MODEL_SECONDS = 1800.0

# The client has one helper process for all runs of this process, those of the user's own code included.
_lock = threading.Lock()

_open_pages: list[WandBPage] = []

_unreachable: list[str] = []


def errors() -> tuple[type[Exception], ...]:
    """What the client raises for a service, a network, a disk or a helper process that fails it.

    Some have no public name: pyproject.toml bounds the client's version, and a test imports them.
    """
    import wandb
    from wandb.sdk.lib.asyncio_manager import AlreadyJoinedError
    from wandb.sdk.lib.service.service_token import WandbServiceConnectionError
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
    from wandb.sdk.mailbox.mailbox_handle import ServerResponseError

    own = (HandleAbandonedError, MailboxClosedError, ServerResponseError, WandbServiceConnectionError)
    return (wandb.Error, OSError, AlreadyJoinedError, *own)


def _settings(*, with_model: bool) -> Any:
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        init_timeout=OPEN_SECONDS,
        finish_timeout=MODEL_SECONDS if with_model else FINISH_SECONDS,
        finish_timeout_raises=True,
        # Else a call that nobody answers is tried again for hours, and the end of the run waits behind it.
        x_graphql_timeout_seconds=ANSWER_SECONDS,
        x_graphql_retry_max=3,
        x_graphql_retry_wait_max_seconds=2.0,
        # Rows, in contrast, are tried again until the run ends: an outage of hours leaves no gap.
        x_file_stream_retry_max=100_000,
        x_file_stream_retry_wait_max_seconds=10.0,
        # A process that is killed loses what is not written: a second of rows, not fifteen.
        x_transaction_log_flush_interval=1.0,
        # The command line may hold a token, and a remote a user's name: what is told of the run is `facts`.
        x_disable_meta=True,
        disable_git=True,
        disable_code=True,
        save_code=False,
        x_save_requirements=False,
    )


def _start(project: str, mode: Any, options: dict[str, Any], *, with_model: bool) -> WandBTracker:
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True, mode=mode))  # its helper process prints on its own account else
    tracker = WandBTracker(project, mode=mode, settings=_settings(with_model=with_model), **options)
    tracker.start()
    return tracker


def abandon() -> None:
    """End the client's helper process, which has written every row to disk and waits for a service in vain."""
    import wandb

    if wandb.run is not None:
        return  # a run of the user's own is at it too
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("wandb-core"):
                child.kill()


def close() -> None:
    """End the helper process; only then is everything on disk."""
    import wandb

    _open_pages.clear()
    _unreachable.clear()
    if wandb.run is None:
        with contextlib.suppress(*errors(), SystemExit):  # it leaves the program where its helper was killed
            wandb.teardown()


def _start_somehow(project: str, options: dict[str, Any], *, with_model: bool) -> WandBTracker:
    """Online if the service answers, else offline; a service that did not answer is not asked again."""
    import wandb

    if not _unreachable:
        try:
            return _start(project, os.environ.get("WANDB_MODE", "online"), options, with_model=with_model)
        except errors() as error:
            reason = without_secrets(" ".join(str(error).split()))[:200]
        logger.warning(
            "W&B: %s; training goes on, and the run is recorded offline: launch/sync_wandb.sh %s uploads it",
            reason,
            options["dir"],
        )
        # The name of the run is taken by the one that failed, until the helper process ends: if others need that, the
        # run gets another name.
        if _open_pages or wandb.run is not None:
            options = {**options, "id": f"{options['id']}-offline"}
        else:
            close()
        _unreachable.append(reason)
    return _start(project, "offline", options, with_model=with_model)


class WandBPage:
    """One run in W&B."""

    def __init__(self, tracker: WandBTracker) -> None:
        self.tracker = tracker
        # The x axis of everything: seeds are trained one after another, each from step 1.
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")

    @classmethod
    def open(
        cls, args: TrainingArguments, directory: Path, identity: str, seed: int | None, facts: dict[str, Any]
    ) -> WandBPage:
        """Go on with the run of this identity, or begin it."""
        name = args.run_name or os.environ.get("WANDB_NAME") or directory.resolve().name
        group = args.wandb_group or os.environ.get("WANDB_RUN_GROUP") or (name if seed is not None else None)
        options: dict[str, Any] = {
            "id": identity,
            "resume": "allow",
            "reinit": "create_new",
            "name": without_secrets(name if seed is None else f"{name}, seed {seed}"),
            "group": without_secrets(group),
            "job_type": "train" if seed is None else "seed",
            "entity": args.wandb_entity,
            "tags": without_secrets(args.wandb_tags),
            "notes": without_secrets(args.wandb_notes),
            "config": facts,
            "dir": os.environ.get("WANDB_DIR") or str(directory),
        }
        project = args.wandb_project or os.environ.get("WANDB_PROJECT") or PROJECT
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the client reports to its makers else
        with _lock:
            page = cls(_start_somehow(project, options, with_model=args.wandb_log_model))
            _open_pages.append(page)
        run = page.tracker.tracker
        logger.info("W&B: %s", run.url or f"offline in {options['dir']}, launch/sync_wandb.sh uploads it")
        return page

    def row(self, values: dict[str, Any]) -> None:
        self.tracker.log(values, commit=True)

    def alert(self, kind: str, text: str) -> None:
        self.tracker.tracker.alert(title=kind.replace("_", " "), text=text, level="WARN")

    def summary(self, values: dict[str, Any]) -> None:
        self.tracker.tracker.summary.update(values)

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self.tracker.log_table(name, columns=columns, data=rows)

    def images(self, paths: Mapping[str, Path]) -> None:
        self.tracker.log_images({name: [str(path)] for name, path in paths.items()})

    def model(self, path: Path) -> None:
        """The promoted model as an artifact."""
        import wandb

        run = self.tracker.tracker
        artifact = wandb.Artifact(f"gradiend-{run.id}", type="model")
        for file in sorted(item for item in path.rglob("*") if item.is_file()):
            if file.name == TRAINING:  # it has the arguments as they were given
                with artifact.new_file(TRAINING) as clean:
                    json.dump(without_secrets(read_json(file)), clean)
            else:
                artifact.add_file(str(file), name=file.relative_to(path).as_posix())
        run.log_artifact(artifact)

    def finish(self, outcome: str) -> None:
        run = self.tracker.tracker
        if outcome == "preempted":
            run.mark_preempting()
        run.finish(exit_code=0 if outcome == "finished" else 1)
        if not run.offline and not run.disabled:
            Path(f"{run.settings.sync_file}.synced").touch()  # all of it arrived: sync_wandb.sh leaves it alone
