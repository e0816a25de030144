"""Who is told while a run goes on."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from gradiend_dist.config.checks import require, require_choice
from gradiend_dist.config.choices import TRACKERS
from gradiend_dist.config.fields import documented


@documented
@dataclass(kw_only=True)
class TrackingArguments:
    """Who is told while a run goes on. metrics.jsonl in experiment_dir has every number in any case."""

    report_to: list[str] | None = None
    """wandb and tensorboard, or none."""
    run_name: str | None = None
    """Name of the run in W&B. None: WANDB_NAME, or the experiment's directory."""
    wandb_project: str | None = None
    """Project in W&B. None: WANDB_PROJECT, or gradiend_dist."""
    wandb_entity: str | None = None
    """User or team in W&B. None: WANDB_ENTITY, or your default."""
    wandb_group: str | None = None
    """Group of the run in W&B. None: WANDB_RUN_GROUP."""
    wandb_tags: list[str] | None = None
    """Tags of the run in W&B. None: WANDB_TAGS."""
    wandb_notes: str | None = None
    """Notes on the run in W&B. None: WANDB_NOTES."""
    wandb_seed_runs: Literal["one", "grouped"] = "one"
    """one: all seeds as series of one run; grouped: a run for each, grouped."""
    wandb_log_model: bool = False
    """Upload the promoted model to W&B as an artifact."""

    def check(self) -> None:
        for name in self.report_to or ():
            require_choice("report_to", name, (*TRACKERS, "none"))
        require(
            not self.wandb_log_model or "wandb" in self.trackers,
            "wandb_log_model uploads to W&B, which report_to does not name: pass report_to wandb.",
        )
        require(
            "tensorboard" not in self.trackers or importlib.util.find_spec("tensorboard") is not None,
            'report_to=tensorboard needs a package that is not installed: pip install "gradiend_dist[tensorboard]".',
        )

    @property
    def trackers(self) -> list[str]:
        """What report_to names, each once."""
        return [name for name in dict.fromkeys(self.report_to or ()) if name != "none"]
