"""Where results go and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradiend_dist.config.checks import check_path, require, require_positive
from gradiend_dist.config.fields import documented

# Bytes by which the name of a directory is extended while it is written.
PARTIAL_NAME = 40


@documented
@dataclass(kw_only=True)
class OutputArguments:
    """Where results go and what is kept."""

    experiment_dir: str | None = None
    """Root of this experiment; results go to experiment_dir[/run_id]."""
    output_dir: str | None = None
    """Directory of the promoted model. None: experiment_dir[/run_id]/model."""
    use_cache: bool | str = False
    """Reuse results of an earlier run with the same arguments, model and data: false, true, only_convergent, or always
    (reuse whatever is there)."""
    save_strategy: Literal["best", "steps", "no"] = "best"
    """best: the best checkpoint; steps: also every save_steps; no: only the end."""
    save_steps: int = 5000
    """Save the training state every this many steps, and with save_strategy=steps model_step_N as well."""
    save_total_limit: int = 2
    """Training states to keep; older ones are deleted."""
    resume: bool = True
    """Go on with an unfinished run in experiment_dir that had the same arguments. False: start anew."""
    save_only_best: bool = True
    """Promote the best checkpoint. False: promote the last, keep all epochs."""
    delete_models: bool = False
    """Delete every model file but the promoted one at the end."""
    logging_steps: int = 50
    """Log loss, norms, learning rate and speed every this many steps."""

    def check(self) -> None:
        for name in ("experiment_dir", "output_dir"):
            if vars(self)[name] is not None:
                check_path(name, vars(self)[name], spare=PARTIAL_NAME)
        require(
            self.use_cache in (True, False, "always", "only_convergent"),
            f"use_cache={self.use_cache!r} is not known: choose true, false, always or only_convergent.",
        )
        require_positive("save_steps", self.save_steps)
        require_positive("save_total_limit", self.save_total_limit)
        require_positive("logging_steps", self.logging_steps)

    @property
    def load_best_model_at_end(self) -> bool:
        """What Hugging Face callbacks ask for under this name."""
        return self.save_only_best
