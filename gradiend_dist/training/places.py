"""Where a run's results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradiend_dist.config.arguments import TrainingArguments


@dataclass(frozen=True)
class Places:
    """Where a run's results go."""

    model: Path
    """The promoted model."""
    seeds: Path
    experiment: Path | None
    """None: the results are in a temporary directory."""

    def state(self, args: TrainingArguments) -> Path | None:
        """What an unfinished run goes on from; tasks of a job array have one each."""
        name = "state" if args.only_seed is None else f"state_seed_{args.only_seed}"
        return None if self.experiment is None else self.experiment / name

    @property
    def logs(self) -> Path:
        """Where metrics and plots go."""
        return self.seeds if self.experiment is None else self.experiment

    def seed(self, seed: int, args: TrainingArguments) -> Path:
        """A seed's own directory; a single seed is promoted where it stands."""
        return self.seeds / f"seed_{seed}" if args.max_seeds > 1 else self.model
