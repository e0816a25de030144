"""gradiend_dist against the reference package `gradiend` 0.2.3: time, peak memory, and whether both found the same.

    python benchmarks/vs_reference.py [--workload NAME ...] [--threads 2] [--repeat 1] [--quick]

Each package runs in a process of its own, one after the other, with the same number of threads on the same base model
and rows; ours with compat="gradiend-0.2", so that every loss and score must be the reference's. "end to end" is from
building the trainer to the end of train(); the process's start and imports are in "whole process" only. Peak memory is
that of the whole process. Base models are random BERTs, made in a temporary directory: nothing is downloaded.

Time is that of the machine: run it on an otherwise idle one. All workloads take about ten minutes, nearly all of them
the reference's. The exit status is 1 if the results differ; a ratio below its expectation is only marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("gradiend", "gradiend_dist")
MEMORY_RATIO = 0.7
# Both sum in float32, in different orders, and AdamW's first steps carry such differences on.
LOSS_TOLERANCE = 1e-3
SCORE_TOLERANCE = 1e-3
BATCH_SIZE = 8
VOCABULARY = 30522
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PRONOUNS = {"M": "he", "F": "she"}


@dataclass(frozen=True)
class Workload:
    name: str
    hidden: int
    layers: int
    words: tuple[int, int]
    """Fewest and most words of a sentence; two special tokens are added to them."""
    pruned: bool
    """Pre-prune to 1 %, then three seeds with an evaluation every fifth of the run; if not, one seed, no evaluation."""
    steps: int
    epochs: int
    expected: float
    """End-to-end time of the reference divided by ours, at least."""
    eval_rows: int = 40

    @property
    def train_rows(self) -> int:
        return self.steps // self.epochs * BATCH_SIZE

    def reduced(self) -> Workload:
        return dataclasses.replace(self, steps=10, epochs=1, eval_rows=8)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("standard-4M", 128, 2, (10, 20), pruned=True, steps=60, epochs=2, expected=40),
        Workload("unpruned-4M", 128, 2, (10, 20), pruned=False, steps=40, epochs=1, expected=15),
        Workload("unpruned-30M", 512, 4, (10, 20), pruned=False, steps=20, epochs=1, expected=8),
        Workload("standard-256", 128, 2, (254, 254), pruned=True, steps=20, epochs=2, expected=4, eval_rows=20),
    )
}


# What both packages get


def prepare(workload: Workload, directory: Path) -> None:
    """Write the base model and the rows."""
    import pandas as pd
    import torch
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=workload.hidden,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.hidden // 64,
        intermediate_size=4 * workload.hidden,
        initializer_range=0.05,  # as of a trained model: gradients of a flatter one are all alike
    )
    BertForMaskedLM(config).save_pretrained(directory / "base_model")
    write_tokenizer(directory / "base_model")
    pd.DataFrame(make_rows(workload)).to_csv(directory / "rows.csv", index=False)


def write_tokenizer(directory: Path) -> None:
    """A word is a token: the pronouns, and nouns without end."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *PRONOUNS.values()]
    words += [f"noun{i}" for i in range(VOCABULARY - len(words))]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, **dict(zip(names, SPECIAL, strict=True))
    ).save_pretrained(directory)


def make_rows(workload: Workload) -> list[dict[str, str]]:
    """Sentences of nouns with one pronoun; the nouns of a class are its own, so that the model could know it."""
    rng = random.Random(0)
    rows = []
    for split, count in (("train", workload.train_rows), ("validation", workload.eval_rows)):
        for number in range(count):
            name, other = ("M", "F") if number % 2 == 0 else ("F", "M")
            nouns = [f"noun{2 * rng.randrange(10_000) + (name == 'F')}" for _ in range(rng.randint(*workload.words))]
            nouns[rng.randrange(len(nouns))] = "[MASK]"
            rows.append(
                {
                    "masked": " ".join(nouns),
                    "split": split,
                    "label": PRONOUNS[name],
                    "label_class": name,
                    "alternative": PRONOUNS[other],
                    "alternative_class": other,
                }
            )
    return rows


# One package's run, in a process of its own


def run(package: str, workload: Workload, directory: Path, threads: int) -> None:
    """Train with `package` and leave seconds.json and the experiment's files."""
    import pandas as pd
    import torch
    from transformers import BertForMaskedLM  # noqa: F401  transformers imports it on first use: before the clock starts

    if package == "gradiend":
        from gradiend import PrePruneConfig, TextPredictionTrainer, TrainingArguments

        compat = {}
    else:
        from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments

        compat = {"compat": "gradiend-0.2"}
    torch.set_num_threads(threads)
    # A plain relative path: the reference takes any path with "t5" or "led" in it, as temporary ones may have, for that
    # of an encoder-decoder model.
    os.chdir(directory)
    data = pd.read_csv("rows.csv")
    start = time.perf_counter()
    prune = PrePruneConfig(n_samples=16, topk=0.01, source="diff", seed=0) if workload.pruned else None
    args = TrainingArguments(
        experiment_dir=package,
        train_batch_size=BATCH_SIZE,
        num_train_epochs=workload.epochs,
        learning_rate=1e-3,
        eval_steps=workload.steps // 5,
        do_eval=workload.pruned,
        max_seeds=3 if workload.pruned else 1,
        min_convergent_seeds=None,
        pre_prune_config=prune,
        seed=0,
        **compat,
    )
    TextPredictionTrainer("base_model", data=data, target_classes=list(PRONOUNS), args=args).train()
    Path(package, "seconds.json").write_text(json.dumps(time.perf_counter() - start))


class ChildFailed(Exception):
    """A package could not do its work; the other workloads are still measured."""


@dataclass
class Measured:
    seconds: float
    """End to end."""
    process_seconds: float
    cpu_seconds: float
    """Of the whole process: the number to look at on a busy machine (with one thread; more of them wait actively)."""
    mebibytes: float


def start(what: str, workload: Workload, directory: Path, options: argparse.Namespace) -> tuple[float, float, float]:
    """Run this file again to do one part of the work; returns seconds, CPU seconds and peak MiB of that process."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(variables, str(options.threads)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--child", what, "--workload", workload.name, "--directory", str(directory)]
    command += ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
    log = directory / f"{what}.log"
    begin = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)  # the only way to one child's peak memory
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ChildFailed(f"{what} failed on {workload.name}:\n{log.read_text()[-3000:]}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024  # Linux counts it in KiB


def measure(package: str, workload: Workload, directory: Path, options: argparse.Namespace) -> Measured:
    shutil.rmtree(directory / package, ignore_errors=True)
    whole_process = start(package, workload, directory, options)
    end_to_end = json.loads((directory / package / "seconds.json").read_text())
    return Measured(end_to_end, *whole_process)


# Did both find the same?


def found(directory: Path, workload: Workload) -> dict[int, dict[str, Any]]:
    """Of each seed: losses, scores and class means by step, all as lists."""
    runs = {seed: f"seeds/seed_{seed}" for seed in range(3)} if workload.pruned else {0: "model"}
    results = {}
    for seed, path in runs.items():
        record = json.loads((directory / path / "training.json").read_text())
        stats = record["training_stats"]
        results[seed] = {"losses": record["losses"], "scores": list(stats["scores"].values())}
        by_step = stats.get("mean_by_class", {}).values()
        results[seed]["class means"] = [means[label] for means in by_step for label in sorted(means)]
    return results


def kept_weights(directory: Path) -> set[tuple[str, int]]:
    """The weights that pre-pruning kept, as (key of the base weight, position in it)."""
    from safetensors.numpy import load_file

    kept = set()
    for name in ("mapping_indices", "mapping_masks"):
        path = directory / "model" / f"{name}.safetensors"
        for key, values in (load_file(path) if path.exists() else {}).items():
            positions = values.ravel().nonzero()[0] if name == "mapping_masks" else values
            kept.update((key, int(position)) for position in positions)
    return kept


def differences(workload: Workload, directory: Path) -> list[str]:
    """Print how far the results are from each other; returns what is too far."""
    theirs, ours = (found(directory / package, workload) for package in PACKAGES)
    wrong = []
    for field, tolerance in (("losses", LOSS_TOLERANCE), ("scores", SCORE_TOLERANCE), ("class means", SCORE_TOLERANCE)):
        pairs = [(theirs[seed][field], ours[seed][field]) for seed in theirs]
        if any(len(a) != len(b) for a, b in pairs):
            wrong.append(f"{field}: {[len(a) for a, _ in pairs]} against {[len(b) for _, b in pairs]} numbers")
            continue
        both = [(x, y) for a, b in pairs for x, y in zip(a, b, strict=True)]
        # Losses are far below 1 and compared by their ratio.
        largest = max((abs(x - y) / (abs(x) if field == "losses" else 1.0) for x, y in both), default=0.0)
        if both:
            print(f"  {field:<15}{len(both)} numbers, largest difference {largest:.1e} (allowed {tolerance:.0e})")
        if largest > tolerance:
            wrong.append(field)
    if workload.pruned:
        wrong += differences_of_seeds(directory)
    return wrong


def differences_of_seeds(directory: Path) -> list[str]:
    reports = [json.loads((directory / package / "seeds/seed_report.json").read_text()) for package in PACKAGES]
    chosen = [report["best_seed"] for report in reports]
    kept = [kept_weights(directory / package) for package in PACKAGES]
    common = len(kept[0] & kept[1])
    print(f"  {'selected seed':<15}{chosen[0]} and {chosen[1]}")
    print(f"  {'kept weights':<15}{len(kept[0]):,} and {len(kept[1]):,}, {common:,} in common")
    # Importances next to the limit may be a rounding apart.
    same_weights = len(kept[0]) == len(kept[1]) and common > 0.999 * len(kept[0])
    return [name for name, same in (("seed", chosen[0] == chosen[1]), ("kept weights", same_weights)) if not same]


# Reports


def compare(workload: Workload, options: argparse.Namespace) -> bool:
    """Measure both packages on one workload and print the outcome; are the results the same?"""
    with tempfile.TemporaryDirectory(prefix="gradiend_benchmark_") as temporary:
        directory = Path(temporary)
        print(f"{workload.name}: {describe(workload)}, {options.threads} threads", flush=True)
        start("prepare", workload, directory, options)
        # Taking turns, so that a slow minute of the machine does not hit all runs of one package.
        turns = range(options.repeat)
        pairs = [[measure(package, workload, directory, options) for package in PACKAGES] for _ in turns]
        theirs, ours = (best([pair[side] for pair in pairs]) for side in (0, 1))
        print_ratios(workload, theirs, ours, judged=not options.quick)
        wrong = differences(workload, directory)
    print(f"  the results {'DIFFER in ' + ', '.join(wrong) if wrong else 'agree'}\n", flush=True)
    return not wrong


def best(measured: list[Measured]) -> Measured:
    """The shortest times and the lowest peak of several runs."""
    return Measured(*(min(values) for values in zip(*map(dataclasses.astuple, measured), strict=True)))


def describe(workload: Workload) -> str:
    low, high = (words + 2 for words in workload.words)
    tokens = str(low) if low == high else f"{low}-{high}"
    training = "pre-pruned to 1 %, 3 seeds with 6 evaluations each" if workload.pruned else "unpruned, 1 seed"
    return f"{training}, {workload.steps} steps in {workload.epochs} epochs, {BATCH_SIZE} rows of {tokens} tokens"


def print_ratios(workload: Workload, theirs: Measured, ours: Measured, *, judged: bool) -> None:
    speed, memory = theirs.seconds / ours.seconds, ours.mebibytes / theirs.mebibytes
    print(f"  {'':<15}{'gradiend':>13}{'gradiend_dist':>15}{'ratio':>8}")
    for name, unit, a, b, ratio, note in (
        ("end to end", "s", theirs.seconds, ours.seconds, speed, limit(">=", workload.expected, speed)),
        ("whole process", "s", theirs.process_seconds, ours.process_seconds, None, ""),
        ("its CPU time", "s", theirs.cpu_seconds, ours.cpu_seconds, None, ""),
        ("peak memory", "MiB", theirs.mebibytes, ours.mebibytes, memory, limit("<=", MEMORY_RATIO, memory)),
    ):
        print(f"  {name:<15}{a:>9.1f} {unit:<3}{b:>11.1f} {unit:<3}{ratio or a / b:>8.2f} {note if judged else ''}")


def limit(sign: str, expected: float, ratio: float) -> str:
    fine = ratio >= expected if sign == ">=" else ratio <= expected
    return f"(expected {sign} {expected:g}{'' if fine else ', MISSED'})"


def status(workload: Workload, options: argparse.Namespace) -> int:
    try:
        return 0 if compare(workload, options) else 1
    except ChildFailed as error:
        print(f"  {error}\n", flush=True)
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1, help="the best of this many runs counts")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works; ratios mean little")
    parser.add_argument("--child", choices=["prepare", *PACKAGES], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    workloads = [WORKLOADS[name] for name in options.workload or WORKLOADS]
    workloads = [workload.reduced() if options.quick else workload for workload in workloads]
    if options.child == "prepare":
        prepare(workloads[0], options.directory)
        return 0
    if options.child:
        run(options.child, workloads[0], options.directory, options.threads)
        return 0
    return max(status(workload, options) for workload in workloads)


if __name__ == "__main__":
    sys.exit(main())
