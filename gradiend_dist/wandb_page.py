"""A run's page in W&B, through Accelerate's tracker: opened in bounded time, offline where nobody answers."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from accelerate.tracking import WandBTracker

from gradiend_dist.arguments import TrainingArguments
from gradiend_dist.facts import without_secrets

logger = logging.getLogger(__name__)

PROJECT = "gradiend_dist"
# All that a service may keep waiting for happens in a thread of its own: these bound the end of a run, not its steps.
OPEN_SECONDS = 15.0
ANSWER_SECONDS = 5.0
FINISH_SECONDS = 15.0


def errors() -> tuple[type[Exception], ...]:
    """What the client raises for a service, a network, a disk or a helper process that fails it."""
    import wandb
    from wandb.sdk.lib.service.service_token import WandbServiceConnectionError
    from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
    from wandb.sdk.mailbox.mailbox_handle import ServerResponseError

    own = (HandleAbandonedError, MailboxClosedError, ServerResponseError, WandbServiceConnectionError)
    return (wandb.Error, OSError, *own)


def _settings() -> Any:
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        init_timeout=OPEN_SECONDS,
        finish_timeout=FINISH_SECONDS,
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


def _start(project: str, mode: Any, options: dict[str, Any]) -> WandBTracker:
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True, mode=mode))  # its helper process prints on its own account else
    tracker = WandBTracker(project, mode=mode, settings=_settings(), **options)
    tracker.start()
    return tracker


def abandon() -> None:
    """End the client's helper process, which has written every row to disk and waits for a service in vain."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb-core"):
            child.kill()


def close() -> None:
    """End the helper process; only then is everything on disk."""
    import wandb

    with contextlib.suppress(*errors()):
        wandb.teardown()


class WandBPage:
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
            "name": name if seed is None else f"{name}, seed {seed}",
            "group": group,
            "job_type": "train" if seed is None else "seed",
            "entity": args.wandb_entity,
            "tags": args.wandb_tags,
            "notes": args.wandb_notes,
            "config": facts,
            "dir": os.environ.get("WANDB_DIR") or str(directory),
        }
        project = args.wandb_project or os.environ.get("WANDB_PROJECT") or PROJECT
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the client reports to its makers else
        try:
            tracker = _start(project, os.environ.get("WANDB_MODE", "online"), options)
        except errors() as error:
            reason = without_secrets(" ".join(str(error).split()))[:200]
            logger.warning(
                "W&B: %s; training goes on, and the run is recorded offline: launch/sync_wandb.sh %s uploads it",
                reason,
                options["dir"],
            )
            close()  # until then the name of the run is taken by the one that failed
            tracker = _start(project, "offline", options)
        run = tracker.tracker
        logger.info("W&B: %s", run.url or f"offline in {options['dir']}, launch/sync_wandb.sh uploads it")
        return cls(tracker)

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
        artifact.add_dir(str(path))
        run.log_artifact(artifact)

    def finish(self, outcome: str) -> None:
        run = self.tracker.tracker
        if outcome == "preempted":
            run.mark_preempting()
        run.finish(exit_code=0 if outcome == "finished" else 1)
        if not run.offline and not run.disabled:
            Path(f"{run.settings.sync_file}.synced").touch()  # all of it arrived: sync_wandb.sh leaves it alone
