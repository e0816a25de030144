"""What tracking costs: the same training without it, and with W&B that answers, refuses, stalls, limits or fails.

python benchmarks/tracking.py

Steps of a few milliseconds are logged every fiftieth, as by default. The client is the real one, its service a stand-in
on loopback. A step is the mean of the later half, when the page is open or given up, of the fastest of several runs; at
its end a run waits for its last rows, for a bounded time. The stand-in works in the same process, and its work counts.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_ERROR_REPORTING="false")

import torch  # noqa: E402
from fake_wandb import FakeWandb  # noqa: E402

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments, demo  # noqa: E402
from gradiend_dist.report.records import read_rows  # noqa: E402
from gradiend_dist.tracking import tracking  # noqa: E402

STEPS = 5000
REPEATS = 2
LOGGING_STEPS = 50
MODES: tuple[Any, ...] = (None, "accept", "refuse", "stall", "limit", "error")


def train(model: Path, directory: Path, *, tracked: bool) -> tuple[float, float]:
    """Seconds of the median step, and seconds that the end waited."""
    waited: list[float] = []
    leave = tracking.Tracking.__exit__

    def timed(self: tracking.Tracking, *error: Any) -> None:
        start = time.perf_counter()
        leave(self, *error)
        waited.append(time.perf_counter() - start)

    tracking.Tracking.__exit__ = timed  # type: ignore[method-assign]
    try:
        args = TrainingArguments(
            experiment_dir=str(directory),
            pre_prune_config=PrePruneConfig(n_samples=8, topk=0.1, source="diff"),
            train_batch_size=8,
            max_steps=STEPS,
            eval_strategy="no",
            max_seeds=1,
            logging_steps=LOGGING_STEPS,
            report_to=["wandb"] if tracked else None,
        )
        data = demo.feature_data()
        TextPredictionTrainer(str(model), data=data, target_classes=["M", "F"], args=args).train()
    finally:
        tracking.Tracking.__exit__ = leave  # type: ignore[method-assign]
    steps = [row["step_seconds"] for row in read_rows(directory / "metrics.jsonl") if row.get("step", 0) > STEPS // 2]
    return statistics.fmean(steps), waited[0]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        model = demo.build_masked_lm(root / "model")
        found: dict[Any, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for repeat in range(REPEATS):
            for mode in MODES:
                with FakeWandb(mode or "accept") as service:
                    os.environ.update(service.environment)
                    found[mode].append(train(model, root / f"{mode}_{repeat}", tracked=mode is not None))
    alone = min(step for step, _ in found[None])
    print(f"{'W&B':<12}{'a step':>10}{'/ without':>11}{'end waits':>12}")
    for mode, runs in found.items():
        step, wait = min(step for step, _ in runs), max(wait for _, wait in runs)
        name = "not used" if mode is None else mode
        print(f"{name:<12}{1000 * step:>7.2f} ms{step / alone:>10.2f}x{wait:>10.1f} s")


if __name__ == "__main__":
    main()
