"""How far each method makes a language model say the other word, at the same harm: this package against its rivals.

    python benchmarks/effect.py [--embedded masked causal] [--causal DIR ...] [--masked DIR ... --corpus DIR]
                                [--method NAME ...] [--seeds 1] [--max-harm 0.01] [--json FILE] [--threads 1]
    python benchmarks/effect.py --masked DIR --corpus DIR --versus-reference

Contestants get the same base model, rows and neutral texts, each in a process of its own:

    default      this package with its default arguments: train(), evaluate_decoder(), rewrite_base_model()
    reference    the recipe of `gradiend` 0.2.3: trained at three learning rates (compat mode gives its numbers: see
                 vs_reference.py), then the points of its grid of strengths. "at equal harm" is the best of all these
                 points that do no more harm than is allowed, by the ruler of this table; "its own choice" is what its
                 own rule takes of the grid, at the same learning rate
    plain, tensor
                 the same along the decoder's vector as it is, and with the same relative change of each weight matrix;
                 the default divides by the curvature
    steering, contrastive, swapped: see rivals.py

    he / she     probability of the word at the blanks of the other class, mean over rows of the test split
    harm         growth of perplexity on neutral texts of the searched kind, in percent, that nobody has seen before,
                 and its standard error; the strength was searched on other texts of that kind, to do at most --max-harm
    elsewhere    the same on texts of another kind
    gradients    backward passes through the base model, evaluations of training included, and rows in them
    CPU s        processor time from rows to the changed models of both classes: loading, training, search
    memory       peak of the process until then, in MB; this package keeps gradients in a quarter of what is free

The reference's costs are those of compat mode at all three rates; the package's own are in the other table.

`effect_cases.py` says what the rows and texts are. --versus-reference is another table: the time from rows to two saved
models, against the reference package itself with its default arguments, its grid and its rewriting.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
import versus_reference  # noqa: E402
from convergence import CLASSES, by_step  # noqa: E402
from effect_cases import Amounts, Case, causal_case, embedded_case, masked_case  # noqa: E402
from rivals import (  # noqa: E402
    Chosen,
    Rivals,
    Ruler,
    SecondTexts,
    WeightChange,
    best_of,
    copied,
    difference,
)
from torch import nn  # noqa: E402

from gradiend_dist import TextPredictionTrainer  # noqa: E402
from gradiend_dist.evaluation.grid import LEARNING_RATES as STRENGTHS  # noqa: E402
from gradiend_dist.storage.files import read_json, write_json  # noqa: E402

COMPAT = "gradiend-0.2"
REFERENCE_RATES = (1e-5, 1e-4, 1e-3)
# Ten times the perplexity: no larger strength is looked at.
DESTROYED = 9.0


# One contestant, in a process of its own


@dataclass
class Gradients:
    """Forward passes that a gradient is wanted of."""

    passes: int = 0
    rows: int = 0

    def watch(self, model: nn.Module) -> None:
        def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                self.passes += 1
                self.rows += len(inputs[0])

        model.get_input_embeddings().register_forward_pre_hook(note)  # type: ignore[operator]


@dataclass
class Contest:
    """What a contestant is given."""

    case: Case
    seed: int
    directory: Path
    max_harm: float
    steps: int
    gradients: Gradients = field(default_factory=Gradients)

    def trainer(self, name: str, **arguments: Any) -> TextPredictionTrainer:
        trainer = self.case.trainer(self.directory / name, seed=self.seed, **arguments)
        self.gradients.watch(trainer.session.base_model)
        return trainer

    @functools.cached_property
    def untrained(self) -> TextPredictionTrainer:
        return self.trainer("untrained")

    @functools.cached_property
    def ruler(self) -> Ruler:
        """Of the search: half of the texts, as this package's own search takes them."""
        return Ruler(self.untrained, "validation", self.case.search[::2])

    def rivals(self) -> Rivals:
        return Rivals(self.untrained, self.ruler, max_harm=self.max_harm, steps=self.steps, seed=self.seed)


@dataclass
class Outcome:
    trainer: TextPredictionTrainer
    """Its base model is what is changed."""
    chosen: dict[str, dict[str, Chosen]]
    """By the name of a row of the table, then by class."""
    facts: dict[str, Any] = field(default_factory=dict)


def default(contest: Contest, scaling: str | None = None) -> Outcome:
    trainer = contest.trainer("default")
    trainer.train()
    found = trainer.evaluate_decoder(split="validation", max_harm=contest.max_harm, scaling=scaling)
    base = trainer.session.base_model
    before = copied(dict(base.named_parameters()))
    chosen = {}
    for name in CLASSES:
        what = f"change {found[name].get('relative_change', 0.0):.1e}, {found[name]['evaluations']} evaluations"
        if "refusal" in found[name]:
            chosen[name] = Chosen(what, WeightChange(base, {}), 0.0, found[name]["base_value"])
            continue
        change = WeightChange(base, difference(trainer.rewrite_base_model(found, name), before))
        chosen[name] = Chosen(what, change, 1.0, found[name]["value"])
    return Outcome(trainer, {scaling or "default": chosen}, facts_of(trainer))


def facts_of(trainer: TextPredictionTrainer) -> dict[str, Any]:
    record = trainer.get_training_stats()
    stats, best = record["training_stats"], record["best_score_checkpoint"]["global_step"]
    return {
        "converged": record["convergence_info"]["converged"],
        "correlation": record["best_score_checkpoint"].get("correlation"),
        "step": best,
        "explained": by_step(stats.get("explained", {})).get(best),
        "explained_limit": stats.get("explained_limit"),
    }


def reference(contest: Contest) -> Outcome:
    candidates: dict[str, list[Chosen]] = {name: [] for name in CLASSES}
    for rate in REFERENCE_RATES:
        trainer = reference_trainer(contest, rate)
        changes = directions(trainer, contest.untrained.session.base_model)
        del trainer  # with its gradients
        for name, change in changes.items():
            candidates[name].append(best_point(contest, name, change, f"rate {rate:g}"))
    totals = [sum(points[place].value for points in candidates.values()) for place in range(len(REFERENCE_RATES))]
    rate = REFERENCE_RATES[totals.index(max(totals))]
    best = reference_trainer(contest, rate)
    return Outcome(
        contest.untrained,
        {
            "reference, at equal harm": {name: best_of(points) for name, points in candidates.items()},
            "reference, its own choice": own_choice(best, contest, f"rate {rate:g}"),
        },
        {"learning_rate": rate, **facts_of(best)},
    )


def reference_trainer(contest: Contest, rate: float) -> TextPredictionTrainer:
    """Trained at this rate, now or before."""
    arguments = {"compat": COMPAT, "learning_rate": rate, "use_cache": True}
    return contest.trainer(f"reference_{rate:g}", **arguments).train()


def directions(trainer: TextPredictionTrainer, model: nn.Module) -> dict[str, WeightChange]:
    """The decoder's vectors, one for each class: what a strength of 1 adds to the base model."""
    far, before = max(STRENGTHS), copied(dict(trainer.session.base_model.named_parameters()))
    found = {}
    for name in CLASSES:
        rewritten = trainer.rewrite_base_model(target_class=name, learning_rate=far)
        found[name] = WeightChange(model, {key: delta / far for key, delta in difference(rewritten, before).items()})
    return found


def best_point(contest: Contest, name: str, change: WeightChange, what: str) -> Chosen:
    """Of the reference's grid of strengths."""
    best = Chosen(what, change, 0.0, contest.ruler.base[name])
    for strength in sorted(STRENGTHS):
        with change.at(strength):
            trial = contest.ruler.trial(name, strength, contest.max_harm)
        if trial.harm > DESTROYED:
            break
        if trial.harm <= contest.max_harm and trial.value is not None:
            best = best_of([best, Chosen(f"{what}, strength {strength:g}", change, strength, trial.value)])
    return best


def own_choice(trainer: TextPredictionTrainer, contest: Contest, what: str) -> dict[str, Chosen]:
    found = trainer.evaluate_decoder(split="validation")
    changes = directions(trainer, contest.untrained.session.base_model)
    return {
        name: Chosen(
            f"{what}, strength {found[name]['learning_rate']:g}",
            changes[name],
            found[name]["learning_rate"],
            found[name]["value"],
        )
        for name in CLASSES
    }


def rival(name: str) -> Callable[[Contest], Outcome]:
    def run(contest: Contest) -> Outcome:
        return Outcome(contest.untrained, {name: getattr(contest.rivals(), name)()})

    return run


CONTESTANTS: dict[str, Callable[[Contest], Outcome]] = {
    "default": default,
    "plain": functools.partial(default, scaling="plain"),
    "tensor": functools.partial(default, scaling="tensor"),
    "reference": reference,
    "contrastive": rival("contrastive"),
    "swapped": rival("swapped"),
    "steering": rival("steering"),
}


# Of this package: told from the default where somebody asks.
OTHER_DIRECTIONS = ("plain", "tensor")


def compete(method: str, contest: Contest) -> dict[str, Any]:
    """Let a contestant choose, then judge what it has chosen."""
    start, cpu_start = time.perf_counter(), time.process_time()
    outcome = CONTESTANTS[method](contest)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    costs = {**vars(contest.gradients), "seconds": seconds, "cpu_seconds": cpu_seconds, "memory": peak}
    ruler = Ruler(outcome.trainer, "test", contest.case.held_out)
    second = SecondTexts(ruler, contest.case.second)
    perplexities = {"held_out": ruler.losses.mean, "second": second.base.mean}
    return {
        "base": dict(ruler.base),
        "losses": perplexities,
        "costs": costs,
        "facts": outcome.facts,
        "rows": {
            row: {name: judged(name, chosen, ruler, second) for name, chosen in by_class.items()}
            for row, by_class in outcome.chosen.items()
        },
    }


def judged(name: str, chosen: Chosen, ruler: Ruler, second: SecondTexts) -> dict[str, Any]:
    with chosen.change.at(chosen.strength):
        trial, elsewhere = ruler.trial(name, 0.0), second.harm()
    return {
        "what": chosen.what,
        "searched_value": chosen.value,
        "value": trial.value,
        "harm": trial.harm,
        "harm_error": trial.error,
        "second_harm": elsewhere.value,
        "second_error": elsewhere.error,
    }


# The table


@dataclass
class Row:
    """A method, all seeds."""

    name: str
    runs: list[dict[str, Any]]
    """For each seed what `compete` found, with the classes of this row alone."""

    def spread(self, name: str, field_name: str, form: str, scale: float = 1.0) -> str:
        """The mean over the seeds and, where they differ, the smallest and the largest."""
        values = [scale * run["classes"][name][field_name] for run in self.runs]
        low, mean, high = (format(value, form) for value in (min(values), statistics.fmean(values), max(values)))
        return mean if low == high else f"{mean} ({low}-{high})"

    def cost(self, name: str) -> float:
        return statistics.fmean(run["costs"][name] for run in self.runs)

    def harm(self, name: str, of: str) -> str:
        error = statistics.fmean(100 * run["classes"][name][f"{of}_error"] for run in self.runs)
        return f"{self.spread(name, 'harm' if of == 'harm' else 'second_harm', '.2f', 100)} +- {error:.2f}"

    def cells(self) -> list[str]:
        return [
            self.name,
            *(self.spread(name, "value", ".3f") for name in CLASSES),
            *(self.harm(name, "harm") for name in CLASSES),
            *(self.harm(name, "second") for name in CLASSES),
            f"{self.cost('passes'):.0f} ({self.cost('rows'):.0f})",
            f"{self.cost('cpu_seconds'):.1f}",
            f"{self.cost('memory'):.0f}",
        ]


HEADINGS = (
    "method",
    *CLASSES.values(),
    *(f"harm {word} %" for word in CLASSES.values()),
    *(f"elsewhere {word} %" for word in CLASSES.values()),
    "gradients (rows)",
    "CPU s",
    "memory",
)


def rows_of(found: Mapping[str, Sequence[dict[str, Any]]]) -> list[Row]:
    return [
        Row(name, [{**run, "classes": run["rows"][name]} for run in runs])
        for runs in found.values()
        for name in runs[0]["rows"]
    ]


def print_table(case: Case, found: Mapping[str, Sequence[dict[str, Any]]], options: argparse.Namespace) -> None:
    rows = rows_of(found)
    any_run = rows[0].runs[0]
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    print(
        f"\n{case.name}, harm at most {100 * options.max_harm:g} % where it was searched, {options.seeds} seeds.",
        end=" ",
    )
    print("Base model:", ", ".join(f"{word} {any_run['base'][name]:.2g}" for name, word in CLASSES.items()), end="; ")
    print("loss of a token", ", elsewhere ".join(f"{value:.2f}" for value in any_run["losses"].values()))
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    for row in rows:
        for seed, run in enumerate(row.runs):
            what = "; ".join(f"{CLASSES[name]}: {of['what']}" for name, of in run["classes"].items())
            facts = ", ".join(f"{name} {value}" for name, value in run["facts"].items())
            print(f"  {row.name}, seed {seed}: {what}{'; ' if facts else ''}{facts}")


# Processes


def run_child(arguments: Sequence[str], log: Path, threads: int) -> None:
    """This file again, for one part of the work."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(variables, str(threads))}
    with log.open("w") as output:
        ended = subprocess.run([sys.executable, __file__, *arguments], stdout=output, stderr=output, env=environment)
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{log.read_text()[-3000:]}")


def child(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    logging.getLogger("gradiend_dist").setLevel(logging.WARNING)
    method, case_directory, directory = options.child[0], Path(options.child[1]), Path(options.child[2])
    directory.mkdir()
    if method in versus_reference.PARTS:
        versus_reference.PARTS[method](Case.load(case_directory), directory)
        return 0
    contest = Contest(Case.load(case_directory), options.seed, directory, options.max_harm, options.steps)
    write_json(directory / "found.json", compete(method, contest))
    return 0


def measured(case: Case, options: argparse.Namespace, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """All methods and seeds, taking turns: a slow minute of the machine hits no method's every seed."""
    case.save(directory / "case")
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in options.method}
    for seed in range(options.seeds):
        for method, runs in found.items():
            place = directory / f"{method}_{seed}"
            arguments = ["--child", method, str(directory / "case"), str(place), "--seed", str(seed)]
            arguments += ["--max-harm", str(options.max_harm), "--steps", str(options.steps)]
            arguments += ["--threads", str(options.threads)]
            run_child(arguments, directory / f"{method}_{seed}.log", options.threads)
            runs.append(read_json(place / "found.json"))
            print(
                f"{case.name}, {method}, seed {seed}: {runs[-1]['costs']['seconds']:.0f} s", file=sys.stderr, flush=True
            )
    return found


def cases(options: argparse.Namespace, directory: Path) -> list[Case]:
    amounts = Amounts(options.texts, options.judged_texts)
    found = [embedded_case(kind, directory, amounts) for kind in options.embedded]
    found += [causal_case(model, amounts) for model in options.causal]
    return found + [masked_case(model, options.corpus, amounts) for model in options.masked]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--embedded", nargs="*", choices=["masked", "causal"], help="default: both, if no model is given"
    )
    parser.add_argument("--causal", nargs="*", type=Path, default=[], help="directories of causal models")
    parser.add_argument("--masked", nargs="*", type=Path, default=[], help="directories of masked models")
    parser.add_argument("--corpus", type=Path, help="directory of JSON lists of sentences, for masked models")
    usual = [name for name in CONTESTANTS if name not in OTHER_DIRECTIONS]
    parser.add_argument("--method", nargs="+", choices=list(CONTESTANTS), default=usual)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-harm", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=40, help="of a rival's fine-tuning, 32 rows each")
    parser.add_argument("--texts", type=int, default=160, help="neutral texts that contestants get")
    parser.add_argument("--judged-texts", type=int, default=120, help="neutral texts of each kind that judge them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--versus-reference", action="store_true", help="time from rows to saved models instead")
    parser.add_argument("--json", type=Path, help="where all numbers go")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.masked and options.corpus is None:
        parser.error("--masked needs --corpus: a directory of JSON lists of sentences")
    if options.embedded is None:
        options.embedded = [] if options.causal or options.masked else ["masked", "causal"]
    return options


def main() -> int:
    options = parsed()
    if options.child:
        return child(options)
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gradiend_effect_") as temporary:
        directory = Path(temporary)
        for case in cases(options, directory):
            place = directory / f"{case.name.replace(' ', '_')}_runs"
            place.mkdir()
            if options.versus_reference:
                case.save(place / "case")
                found[case.name] = versus_reference.compare(
                    case, place, lambda part, log: run_child(part, log, options.threads)
                )
                continue
            found[case.name] = measured(case, options, place)
            print_table(case, found[case.name], options)
    if options.json is not None:
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
