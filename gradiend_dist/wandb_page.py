"""A run's page in W&B, through Accelerate's tracker: opened in bounded time, offline where nobody answers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import WandBTracker

from gradiend_dist.arguments import TrainingArguments
from gradiend_dist.facts import without_secrets

logger = logging.getLogger(__name__)

PROJECT = "gradiend_dist"
# All that a service may keep waiting for happens in a thread of its own: these bound the end of a run, not its steps.
OPEN_SECONDS = 20.0
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

    # The setting alone does not silence its helper process.
    os.environ.setdefault("WANDB_SILENT", "true")
    return wandb.Settings(
        silent=True,
        console="off",
        save_code=False,
        init_timeout=OPEN_SECONDS,
        finish_timeout=FINISH_SECONDS,
        # Else a call that nobody answers is tried again for hours, and the end of the run waits behind it.
        x_graphql_timeout_seconds=ANSWER_SECONDS,
        x_graphql_retry_max=1,
        # A process that is killed loses what is not written: a second of rows, not fifteen.
        x_transaction_log_flush_interval=1.0,
    )


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
        import wandb

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
        tracker = WandBTracker(project, settings=_settings(), **options)
        try:
            tracker.start()
        except errors() as error:
            reason = without_secrets(" ".join(str(error).split()))[:200]
            logger.warning(
                "W&B: %s; training goes on, and the run is recorded offline: launch/sync_wandb.sh %s uploads it",
                reason,
                options["dir"],
            )
            wandb.teardown()  # until then the name of the run is taken by the one that failed
            tracker = WandBTracker(project, settings=_settings(), mode="offline", **options)
            tracker.start()
        return cls(tracker)

    def row(self, values: dict[str, Any]) -> None:
        self.tracker.log(values)

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
        if outcome == "finished":
            self.tracker.finish()
            return
        if outcome == "preempted":
            self.tracker.tracker.mark_preempting()
        self.tracker.tracker.finish(exit_code=1)
