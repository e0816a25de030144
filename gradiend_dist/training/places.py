"""Where a run's results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.storage.layout import SEED_DIR, SEED_STATE_DIR, STATE_DIR


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
        name = STATE_DIR if args.only_seed is None else SEED_STATE_DIR.format(seed=args.only_seed)
        return None if self.experiment is None else self.experiment / name

    @property
    def logs(self) -> Path:
        """Where metrics and plots go."""
        return self.seeds if self.experiment is None else self.experiment

    def seed(self, seed: int, args: TrainingArguments) -> Path:
        """A seed's own directory; a single seed is promoted where it stands."""
        return self.seeds / SEED_DIR.format(seed=seed) if args.max_seeds > 1 else self.model
