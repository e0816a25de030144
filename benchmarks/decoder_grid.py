"""The decoder grid of 32 points against the reference package `gradiend` 0.2.3: time, memory, and equal results.

    python benchmarks/decoder_grid.py [--workload NAME ...] [--threads 2]

Both packages score the same trained GRADIEND model on the same rows and neutral texts, each in a process of its own,
one after the other, with the same number of threads; ours with compat="gradiend-0.2", so that every probability and
score must be the reference's. Timed is evaluate_decoder() alone, with everything loaded. Memory is what the grid adds
to the peak of scoring the base model alone, with base model and GRADIEND model loaded. Base models are random BERTs: at
learning rates above 1 their logits are so large that rounding shows, so probabilities are compared up to there. The
exit status is 1 if results differ; a ratio below its expectation is only marked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vs_reference import PRONOUNS, Workload, limit, make_rows, prepare

EXPECTED = 5.0
# What is measured besides a copy of the touched weights: the scores themselves and the allocator.
ALLOWANCE_BYTES = 40e6
TOLERANCE = 1e-5
LARGEST_COMPARED = 1.0
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("4M", 128, 2, (10, 20), pruned=False, steps=2, epochs=1, expected=EXPECTED, eval_rows=200),
        Workload("4M-pruned", 128, 2, (10, 20), pruned=True, steps=2, epochs=1, expected=EXPECTED, eval_rows=200),
        # Most of the time here are forward passes, which both packages must make: the limit is printed.
        Workload("30M", 512, 4, (10, 20), pruned=False, steps=2, epochs=1, expected=2.5, eval_rows=100),
    )
}


def arguments(workload: Workload, package: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"train_batch_size": 8, "max_steps": workload.steps, "max_seeds": 1, "do_eval": False}
    found |= {"learning_rate": 1e-3, "seed": 0}
    if workload.pruned:
        found["pre_prune_config"] = package.PrePruneConfig(n_samples=4, topk=0.01, source="diff")
    return found


def trainer_of(name: str, workload: Workload, directory: Path) -> Any:
    import importlib

    import pandas as pd

    package = importlib.import_module(name)
    rows = pd.read_csv(directory / "rows.csv")
    neutral = pd.DataFrame({"text": [text.replace("[MASK]", "noun7") for text in rows["masked"]][:200]})
    more = {"compat": "gradiend-0.2"} if name == "gradiend_dist" else {"use_cache": True}
    args = package.TrainingArguments(experiment_dir=str(directory / name), **arguments(workload, package), **more)
    return package.TextPredictionTrainer(
        str(directory / "base_model"), data=rows, target_classes=list(PRONOUNS), eval_neutral_data=neutral, args=args
    )


def score(name: str, workload: Workload, directory: Path, threads: int) -> None:
    """In a process of its own: evaluate and write what was measured."""
    import psutil
    import torch

    torch.set_num_threads(threads)
    trainer = trainer_of(name, workload, directory)
    trainer.train()  # the model is there: it is found, not trained, by the second one
    model = trainer.get_model()
    process = psutil.Process()
    alone, peak = Peak(process), Peak(process)
    with alone:
        score_base_model(name, trainer, model)
    start = time.perf_counter()
    with peak:
        found = trainer.evaluate_decoder(use_cache=False, split="validation")
    seconds = time.perf_counter() - start
    gradiend = model.gradiend
    (directory / f"{name}.json").write_text(
        json.dumps(
            {
                "seconds": seconds,
                "added": max(0, peak.bytes - alone.bytes),
                "floor": floor_seconds(name, trainer) * len(found["grid"]),
                "touched": 4 * int(gradiend.input_dim),
                "base": sum(4 * parameter.numel() for parameter in model.base_model.parameters()),
                "grid": [[list(p) if p != "base" else p, flat(entry)] for p, entry in found["grid"].items()],
                "selected": {c: [found[c]["feature_factor"], found[c]["learning_rate"]] for c in PRONOUNS},
            }
        )
    )


def score_base_model(name: str, trainer: Any, model: Any) -> None:
    if name == "gradiend":
        rows, texts = trainer._get_decoder_eval_dataframe(model.tokenizer, split="validation")
        asked = {"training_like_df": rows, "neutral_df": texts}
        trainer.evaluate_base_model(model.base_model, model.tokenizer, use_cache=False, **asked)
        return
    scores_of_grid(trainer).measure_base()


def scores_of_grid(trainer: Any) -> Any:
    """What every point of the grid is scored on."""
    from gradiend_dist.evaluation.decoder_evaluation import DecoderEvaluation
    from gradiend_dist.evaluation.grid import LEARNING_RATES
    from gradiend_dist.evaluation.request import DecoderRequest

    request = DecoderRequest(lrs=LEARNING_RATES, split="validation", use_cache=False)
    scores, _ = DecoderEvaluation(trainer, request).scores()
    return scores


def floor_seconds(name: str, trainer: Any) -> float:
    """What no implementation can do without: the backbone reads every text once, padded to its batch, nothing else."""
    if name == "gradiend":
        return 0.0
    import torch

    scores = scores_of_grid(trainer)
    asked = (scores._at_blanks, *(part.questions for part in scores._in_texts._parts))
    inputs = [batch.inputs for questions in asked for batch in questions._batches]
    start = time.perf_counter()
    with torch.no_grad():
        for _ in range(3):
            for batch in inputs:
                trainer.session.base_model.bert(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    return (time.perf_counter() - start) / 3


class Peak:
    """The largest resident size in a block, looked at every few milliseconds by a thread."""

    def __init__(self, process: Any) -> None:
        self.process, self.bytes = process, 0

    def __enter__(self) -> None:
        import threading

        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.003):
            self.bytes = max(self.bytes, self.process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def flat(entry: dict[str, Any]) -> list[float]:
    by_dataset = entry["probs_by_dataset"]
    return [*(by_dataset[d][c] for d in sorted(by_dataset) for c in sorted(by_dataset[d])), entry["lms"]["lms"]]


def largest_difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    if [point for point, _ in one["grid"]] != [point for point, _ in two["grid"]]:
        return math.inf
    if one["selected"] != two["selected"]:
        print(f"  selected: reference {one['selected']}, gradiend_dist {two['selected']}")
    found = {False: 0.0, True: 0.0}
    for (point, x), (_, y) in zip(one["grid"], two["grid"], strict=True):
        large = point != "base" and point[1] > LARGEST_COMPARED
        found[large] = max(found[large], *(abs(a - b) for a, b in zip(x, y, strict=True)))
    print(f"  largest difference of a score {found[False]:.1e} (at learning rates above {LARGEST_COMPARED:g}:", end=" ")
    print(f"{found[True]:.1e})")
    return found[False]


def compare(workload: Workload, threads: int) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        prepare(workload, directory)
        assert len(make_rows(workload)) > workload.eval_rows, "rows of two splits"
        measured = {}
        for name in ("gradiend_dist", "gradiend"):  # ours first: it trains the model that both evaluate
            command = [sys.executable, __file__, "--score", name, str(directory)]
            command += ["--workload", workload.name, "--threads", str(threads)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            if ended.returncode:
                print(ended.stderr[-3000:])
                return False
            measured[name] = json.loads((directory / f"{name}.json").read_text())
            if name == "gradiend_dist":
                shutil.copytree(directory / name, directory / "gradiend", ignore=shutil.ignore_patterns("decoder*"))
    theirs, ours = measured["gradiend"], measured["gradiend_dist"]
    ratio = theirs["seconds"] / ours["seconds"]
    print(f"\n{workload.name}: {len(ours['grid'])} models, base {ours['base'] / 1e6:.0f} MB, touched weights", end=" ")
    print(f"{ours['touched'] / 1e6:.1f} MB")
    for name, found in (("reference", theirs), ("gradiend_dist", ours)):
        print(f"  {name:14} {found['seconds']:7.1f} s   memory added by the grid {found['added'] / 1e6:7.1f} MB")
    print(
        f"  faster by {ratio:.1f} {limit('>=', workload.expected, ratio)}; bare forward passes of the backbone", end=" "
    )
    print(f"would take {ours['floor']:.1f} s, so at most {theirs['seconds'] / ours['floor']:.1f}")
    difference = largest_difference(theirs, ours)
    allowed = ours["touched"] + ALLOWANCE_BYTES
    if ours["added"] > allowed:
        print(f"  memory: more than the touched weights and {ALLOWANCE_BYTES / 1e6:.0f} MB")
    return difference <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--score", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.score:
        name, directory = options.score
        score(name, WORKLOADS[options.workload[0]], Path(directory), options.threads)
        return 0
    fine = [compare(WORKLOADS[name], options.threads) for name in options.workload]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
