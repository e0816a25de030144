"""Several seeds and how one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradiend_dist.config.checks import check_path, check_seed, require, require_positive
from gradiend_dist.config.choices import Part
from gradiend_dist.config.fields import documented


@documented
@dataclass(kw_only=True)
class SeedArguments:
    """Several seeds and how one is chosen."""

    seed: int | None = None
    """First seed; run i uses seed + i. None: 0."""
    max_seeds: int = 3
    """At most this many seeds."""
    min_convergent_seeds: int | None = 1
    """Stop when this many have converged. None: run all."""
    convergent_metric: Literal["correlation", "loss"] | None = None
    """correlation or loss (None: what the training mode has)."""
    convergence_metric: Literal["correlation", "loss"] | None = None
    """The same under its other documented name: correlation or loss."""
    convergent_score_threshold: float | None = None
    """Converged from here on. None: 0.5 for correlation."""
    convergence_threshold: float | None = None
    """The same under its other documented name."""
    convergent_mean_by_class_threshold: float | None = 0.5
    """And every target class must have a mean encoding at least this far from 0. None: no such condition."""
    seeds_in_parallel: bool | None = None
    """Train all seeds on one stream of gradients. None: when gradients cannot be kept and the heads fit."""
    seed_runs_dir: str | None = None
    """Directory of the seeds' runs. None: experiment_dir[/run_id]/seeds."""
    keep_seed_runs: bool = False
    """Keep the model files of every seed."""
    saved_seed_runs: Literal["all_tried", "all_convergent", "best_only"] | None = None
    """all_tried, all_convergent or best_only: whose model files stay. None: as keep_seed_runs says."""
    fail_on_non_convergence: bool = False
    """End with an error when fewer seeds converge than required."""
    seed_stability_topk: int | None = 1000
    """Compare the top weights of converged seeds. None: do not."""
    seed_stability_part: Part = "decoder-weight"
    """Weights that are compared: encoder-weight, decoder-weight, decoder-bias or decoder-sum."""
    analyze_seed_stability: bool = False
    """Require the comparison of seeds; too few is an error."""
    only_seed: int | None = None
    """Train this one of the run's seeds and promote nothing: one task of a job array. select_only follows."""
    select_only: bool = False
    """Train nothing: promote the best of the seeds that only_seed has trained."""

    def check(self) -> None:
        if self.seed_runs_dir is not None:
            check_path("seed_runs_dir", self.seed_runs_dir)
        require_positive("max_seeds", self.max_seeds)
        require_positive("min_convergent_seeds", self.min_convergent_seeds)
        require_positive("seed_stability_topk", self.seed_stability_topk)
        check_seed("seed", self.seed)
        require(
            self.min_convergent_seeds is None or self.min_convergent_seeds <= self.max_seeds,
            f"min_convergent_seeds={self.min_convergent_seeds} is more than max_seeds={self.max_seeds}: "
            "lower the first or raise the second.",
        )
        require(
            not self.analyze_seed_stability or self.seed_stability_topk is not None,
            "analyze_seed_stability is set but seed_stability_topk is None: pass a number of weights.",
        )
        require(
            not self.analyze_seed_stability or (self.min_convergent_seeds or 0) >= 2,
            f"analyze_seed_stability compares converged seeds but min_convergent_seeds={self.min_convergent_seeds}: "
            "pass at least 2.",
        )
        self._check_array()

    def _check_array(self) -> None:
        """A run whose seeds are tasks of a job array."""
        last = self.first_seed + self.max_seeds - 1
        require(
            self.only_seed is None or self.first_seed <= self.only_seed <= last,
            f"only_seed={self.only_seed} is none of the seeds {self.first_seed} to {last} of this run: pass one of "
            "them, or raise max_seeds.",
        )
        require(
            not self.is_of_array or self.max_seeds > 1,
            f"only_seed and select_only share out several seeds and max_seeds={self.max_seeds}: raise max_seeds.",
        )
        require(
            not (self.only_seed is not None and self.select_only),
            "only_seed trains and select_only does not: pass only one of them.",
        )

    @property
    def is_of_array(self) -> bool:
        """Is this a task of a job array, or the selection after it?"""
        return self.only_seed is not None or self.select_only

    @property
    def first_seed(self) -> int:
        return 0 if self.seed is None else self.seed

    @property
    def data_seed(self) -> int:
        """Seed of row order and samples: the first seed, so that all seeds see the same items."""
        return self.first_seed

    # What Hugging Face callbacks, EarlyStoppingCallback above all, ask the arguments for.
    @property
    def metric_for_best_model(self) -> str:
        assert self.convergent_metric is not None, "TrainingArguments sets it when it is made"
        return self.convergent_metric

    @property
    def greater_is_better(self) -> bool:
        return self.convergent_metric == "correlation"
