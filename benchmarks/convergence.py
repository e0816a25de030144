"""How soon, and how well, a GRADIEND is learnt: the reference's recipe against the start in closed form.

    python benchmarks/convergence.py [--model masked causal] [--stories PATH] [--steps 150] [--seeds 3] [--topk 0.1]
                                     [--params NAME ...] [--json FILE] [--plot FILE] [--threads 2] [--quick]

Three recipes, all by this package, on the same base model, rows and items, none of them pruned unless --topk is given:
random weights and Adam at four learning rates, as the reference trains; the spectral start alone, from 16 and from 8
items; the spectral start and as many steps of Adam at the learning rate that it finds. A seed draws the random weights
and which rows make an item. Every learning rate is in the table; "best" marks the one of the reference's recipe that
most seeds converge with, and of these the one that rewrites best: it is chosen by what it is then judged by.

    converged    seeds that the package calls converged
    correlation  of encodings and classes on the test split, mean over the seeds
    explained    share of the target gradients of held-out items that the decoder explains, and, after "of", what class
                 means would explain: the most that one latent can
    last         the same share at the last step: the step that is promoted is chosen by its correlation
    cosine       of the decoder's slope and the difference of the classes' mean target gradients, all training items
    he / she     how many times as probable as to the base model the class's words are where the other class's stand,
                 in a rewritten model that keeps 99 % of the base model's language-model score on neutral texts: the
                 largest such probability on a grid that begins with steps a factor of two apart, of 2^-14 to 1 of the
                 norm of the rewritten weights, and is refined twice; the geometric mean over the seeds
    by curvature the same with evaluate_decoder(scaling="curvature")
    gradients    training items whose gradient was computed before the first step > until the end; what is computed only
                 to evaluate is left out
    seconds      in train(), its evaluations included, the base model loaded; the mean over the seeds

The masked and the causal model are the embedded ones, which know no other sentences than these; the masked one's score
is an accuracy, of so few tokens that a hundredth of it is one of them. --stories takes the directory of a causal model
of TinyStories (15 million weights know he from she); its rows are made here. Nothing is downloaded. The same command
gives the same numbers but for the seconds, on one machine with one number of threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pandas as pd  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from gradiend_dist import PrePruneConfig, TextPredictionTrainer, TrainingArguments, demo  # noqa: E402
from gradiend_dist.data.schedule import make_schedule  # noqa: E402
from gradiend_dist.evaluation.selection import BASE, LMSThresholdPolicy  # noqa: E402
from gradiend_dist.gradients.base import BaseGradients  # noqa: E402
from gradiend_dist.gradients.items import Item  # noqa: E402
from gradiend_dist.report.plots import (  # noqa: E402
    BLUE,
    DARK,
    GREY,
    SKY,
    VERMILION,
    finish_axes,
    image_path,
    new_figure,
    write_figure,
)
from gradiend_dist.rewriting.move import flat_entries  # noqa: E402
from gradiend_dist.space import ParameterSpace  # noqa: E402
from gradiend_dist.storage.files import write_json  # noqa: E402

CLASSES = {"M": "he", "F": "she"}
LEARNING_RATES = (1e-6, 1e-5, 1e-4, 1e-3)
BATCH_SIZE = 8
SCALINGS = ("plain", "curvature")
EVALUATIONS = 15
# Of the norm of the rewritten weights.
STEPS_OF_REWRITING = tuple(2.0**exponent for exponent in range(-14, 1))
POINTS_OF_A_REFINEMENT = 8
REFINEMENTS = 2
LOWEST_EXPLAINED = -0.5
# A picture as wide as a README shows it.
PICTURE_INCHES, PICTURE_DPI = 9.0, 200


@dataclass(frozen=True)
class Recipe:
    name: str
    arguments: dict[str, Any]
    kind: str
    """reference, start or refined"""
    items: int = 0
    """Read before the first step."""


def recipes(steps: int) -> list[Recipe]:
    reference = [
        Recipe(f"random start, Adam {rate:g}", {"max_steps": steps, "learning_rate": rate}, "reference")
        for rate in LEARNING_RATES
    ]
    start = [
        Recipe(
            f"spectral start, {items} items",
            {"initialization": "spectral", "spectral_items": items, "max_steps": 0},
            "start",
            items,
        )
        for items in (8, 16)
    ]
    arguments = {"initialization": "spectral", "spectral_items": 16, "max_steps": steps, "learning_rate": "auto"}
    return [*reference, *start, Recipe("spectral start, 16 items, Adam auto", arguments, "refined", 16)]


@dataclass
class Case:
    """A base model and what is learnt from it."""

    name: str
    model: Path
    data: Any
    neutral: pd.DataFrame
    space: dict[str, Any]
    """Arguments that say which weights take part."""
    evaluated_rows: int | None = None
    """Of each class, whenever a training is evaluated or a rewritten model scored; None: all."""
    scored_texts: int | None = None
    _directions: dict[str, Tensor] = field(default_factory=dict)

    def trainer(self, directory: Path, seed: int, recipe: Recipe, steps: int) -> TextPredictionTrainer:
        args = TrainingArguments(
            experiment_dir=str(directory),
            train_batch_size=BATCH_SIZE,
            eval_steps=max(1, steps // EVALUATIONS),
            encoder_eval_train_max_size=self.evaluated_rows,
            decoder_eval_max_size_training_like=self.evaluated_rows,
            decoder_eval_max_size_neutral=self.scored_texts,
            # One at a time: seeds of one run would share which rows make an item.
            max_seeds=1,
            seed=seed,
            **self.space,
            **recipe.arguments,
        )
        return TextPredictionTrainer(
            str(self.model), data=self.data, target_classes=list(CLASSES), eval_neutral_data=self.neutral, args=args
        )

    def class_direction(self, trainer: TextPredictionTrainer, space: ParameterSpace) -> Tensor:
        """Mean target gradient of the items that are encoded as +1 minus that of the others, computed once."""
        key = space.fingerprint()
        if key not in self._directions:
            self._directions[key] = class_direction(trainer, space)
        return self._directions[key]


def class_direction(trainer: TextPredictionTrainer, space: ParameterSpace) -> Tensor:
    session = trainer.session
    base, rows, kind = session.base_gradients(space), trainer.inputs.training_items(), trainer.args.target
    sums, counts = {-1: base.empty().zero_(), 1: base.empty().zero_()}, {-1: 0, 1: 0}
    scratch = {kind: base.empty()}
    for numbers in batches(trainer):
        label = int(trainer.args.seen_label(rows.labels[int(numbers[0])]))
        sums[label] += base.compute(rows.item(numbers), [kind], out=scratch)[kind]
        counts[label] += 1
    return sums[1] / counts[1] - sums[-1] / counts[-1]


def batches(trainer: TextPredictionTrainer) -> Sequence[Any]:
    """Row numbers of every training item."""
    args = trainer.args
    return make_schedule(trainer.inputs.training.rows, args.train_batch_size, seed=args.data_seed).batches


# Counting gradients


class Computed(TrainerCallback):
    """Training items whose gradients the base model was asked for."""

    def __init__(self, wanted: set[str]) -> None:
        self.wanted = wanted
        self.items: set[str] = set()
        self.others: set[str] = set()
        self.at_first_step: int | None = None

    def __deepcopy__(self, _: Any) -> Computed:
        return self  # each seed gets its own copy of a callback, which would count for itself

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.at_first_step is None:
            self.at_first_step = len(self.items)

    def note(self, item: Item) -> None:
        (self.items if item.key in self.wanted else self.others).add(item.key)

    @contextmanager
    def watching(self) -> Iterator[None]:
        compute = BaseGradients.compute

        def noted(base: BaseGradients, item: Item, *args: Any, **options: Any) -> dict[str, Tensor]:
            self.note(item)
            return compute(base, item, *args, **options)

        BaseGradients.compute = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            BaseGradients.compute = compute  # type: ignore[method-assign]


# One training


@dataclass
class Rewritten:
    """What the strengthening of a class has reached."""

    base: float
    value: float
    step: float
    """Of the norm of the rewritten weights, before the vector is scaled."""
    lms: float
    """Of the base model's score."""

    @property
    def ratio(self) -> float:
        return self.value / self.base


@dataclass
class Run:
    """One seed of one recipe."""

    seed: int
    converged: bool
    correlation: float
    best_step: int
    explained: float | None
    explained_at_end: float | None
    explained_limit: float | None
    cosine: float
    rewritten: dict[str, dict[str, Rewritten]]
    """By scaling and class."""
    gradients_at_start: int
    gradients_at_end: int
    gradients_of_evaluations: int
    seconds: float
    correlations: dict[int, float]
    """By step, on the validation split."""
    explained_by_step: dict[int, float]


def run(case: Case, recipe: Recipe, seed: int, options: argparse.Namespace, directory: Path) -> Run:
    trainer = case.trainer(directory, seed, recipe, options.steps)
    rows = trainer.inputs.training_items()
    computed = Computed({rows.item(numbers).key for numbers in batches(trainer)})
    start = time.perf_counter()
    with computed.watching():
        trainer.train(callbacks=[computed])
    seconds = time.perf_counter() - start
    record = trainer.get_training_stats()
    stats, best = record["training_stats"], record["best_score_checkpoint"]["global_step"]
    explained = by_step(stats.get("explained", {}))
    gradiend = trainer.get_model().gradiend
    direction = case.class_direction(trainer, gradiend.space)
    count = len(computed.items)
    return Run(
        seed=seed,
        converged=record["convergence_info"]["converged"],
        correlation=trainer.evaluate_encoder(split="test", neutral=False)["correlation"],
        best_step=best,
        explained=explained.get(best),
        explained_at_end=explained.get(max(explained, default=0)),
        explained_limit=stats.get("explained_limit"),
        cosine=torch.cosine_similarity(gradiend.decoder_weight[:, 0], direction, dim=0).item(),
        rewritten={how: {name: rewritten(trainer, name, how) for name in CLASSES} for how in SCALINGS},
        gradients_at_start=count if computed.at_first_step is None else computed.at_first_step,
        gradients_at_end=count,
        gradients_of_evaluations=len(computed.others),
        seconds=seconds,
        correlations=by_step(stats["scores"]),
        explained_by_step=explained,
    )


def by_step(series: dict[str, float]) -> dict[int, float]:
    return {int(step): value for step, value in series.items()}


def rewritten(trainer: TextPredictionTrainer, name: str, scaling: str) -> Rewritten:
    """The most that a class gains at a hundredth of the language-model score.

    Steps are measured by their length: decoders of different size are compared where they change the model as much.
    """
    gradiend = trainer.get_model().gradiend
    factor = trainer.strengthening_factors()[name]
    with torch.no_grad():
        vector = gradiend.forward_decoder(torch.tensor([factor]))
    unit = norm_of_weights(trainer, gradiend.space) / vector.norm().item()
    steps = list(STEPS_OF_REWRITING)
    for refinement in range(REFINEMENTS + 1):
        rates = [step * unit for step in steps]
        # One rule for both scalings, which have different ones by default.
        found = trainer.evaluate_decoder(
            rates, [factor], use_cache=True, target_class=name, scaling=scaling, selector=LMSThresholdPolicy()
        )
        chosen = found[name]
        if refinement < REFINEMENTS:
            place = min(range(len(steps)), key=lambda i: abs(rates[i] - chosen["learning_rate"]))
            steps = between(steps[max(0, place - 1)], steps[min(place + 1, len(steps) - 1)])
    base = found["grid"][BASE]
    point = found["grid"][factor, chosen["learning_rate"]]
    return Rewritten(
        base=base["probs"][name],
        value=chosen["value"],
        step=chosen["learning_rate"] / unit,
        lms=point["lms"]["lms"] / base["lms"]["lms"],
    )


def between(low: float, high: float) -> list[float]:
    """Steps at equal ratios, both ends among them."""
    last = POINTS_OF_A_REFINEMENT + 1
    return [low * (high / low) ** (place / last) for place in range(last + 1)]


def norm_of_weights(trainer: TextPredictionTrainer, space: ParameterSpace) -> float:
    """Of the base weights that are rewritten."""
    parameters = dict(trainer.session.base_model.named_parameters())
    entries = (flat_entries(parameters[weight.name])[weight.flat_indices()] for weight in space.active())
    return math.hypot(*(values.norm().item() for values in entries))


# A table


@dataclass
class Row:
    """One recipe, all seeds."""

    recipe: Recipe
    runs: list[Run]
    is_best: bool = False

    @property
    def converged(self) -> int:
        return sum(run.converged for run in self.runs)

    def ratio(self, name: str, scaling: str) -> float:
        return statistics.geometric_mean(max(run.rewritten[scaling][name].ratio, 1e-9) for run in self.runs)

    @property
    def effect(self) -> float:
        """Of both classes, as the reference rewrites."""
        return statistics.geometric_mean(self.ratio(name, "plain") for name in CLASSES)

    def mean(self, name: str) -> float | None:
        """None where it was not measured."""
        values = [getattr(run, name) for run in self.runs]
        return None if None in values else statistics.fmean(values)

    def cells(self) -> list[str]:
        explained = f"{number(self.mean('explained'))} of {number(self.mean('explained_limit'))}"
        gradients = f"{self.mean('gradients_at_start'):.0f} > {self.mean('gradients_at_end'):.0f}"
        return [
            self.recipe.name + (" (best)" if self.is_best else ""),
            f"{self.converged}/{len(self.runs)}",
            number(self.mean("correlation")),
            explained,
            number(self.mean("explained_at_end")),
            number(self.mean("cosine")),
            *(" / ".join(f"{self.ratio(name, how):.3g}x" for name in CLASSES) for how in SCALINGS),
            gradients,
            f"{self.mean('seconds'):.1f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        explained = ("explained", "explained_at_end", "explained_limit")
        means = ("correlation", *explained, "cosine", "gradients_at_start", "gradients_at_end", "seconds")
        return {
            "recipe": self.recipe.name,
            "kind": self.recipe.kind,
            "arguments": self.recipe.arguments,
            "best_of_reference": self.is_best,
            "converged": self.converged,
            **{name: self.mean(name) for name in means},
            "ratio": {how: {name: self.ratio(name, how) for name in CLASSES} for how in SCALINGS},
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }


HEADINGS = (
    "recipe",
    "converged",
    "correlation",
    "explained",
    "last",
    "cosine",
    " / ".join(CLASSES.values()),
    "by curvature",
    "gradients",
    "seconds",
)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def measure(case: Case, options: argparse.Namespace, directory: Path) -> list[Row]:
    """Train all seeds of all recipes, taking turns: a slow minute of the machine hits no recipe's every seed."""
    rows = [Row(recipe, []) for recipe in recipes(options.steps)]
    warm_up(case, rows[0].recipe, directory / "warm_up")
    for seed, (place, row) in itertools.product(range(options.seeds), enumerate(rows)):
        row.runs.append(run(case, row.recipe, seed, options, directory / f"{place}_{seed}"))
        report(f"{case.name}, seed {seed}: {', '.join(row.cells())}")
    reference = [row for row in rows if row.recipe.kind == "reference"]
    max(reference, key=lambda row: (row.converged, row.effect)).is_best = True
    return rows


def warm_up(case: Case, recipe: Recipe, directory: Path) -> None:
    """What is imported at first use must not count for the first recipe."""
    short = dataclasses.replace(recipe, arguments={**recipe.arguments, "max_steps": 1})
    case.trainer(directory, 0, short, steps=1).train()


def report(text: str) -> None:
    """Progress, apart from the table."""
    print(text, file=sys.stderr, flush=True)


def print_table(case: Case, rows: list[Row], options: argparse.Namespace) -> None:
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    base = {word: rows[0].runs[0].rewritten["plain"][name].base for name, word in CLASSES.items()}
    print(f"\n{case.name}: {options.steps} steps, {options.seeds} seeds, {BATCH_SIZE} rows an item.", end=" ")
    print("In the other's place the base model finds", end=" ")
    print(*(f"{word} {value:.2g} probable: at most {1 / value:.3g}x." for word, value in base.items()))
    for line in lines:
        first, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first, *(cell.strip().rjust(len(cell)) for cell in others)]).rstrip(), flush=True)


# A picture


def draw(found: dict[str, list[Row]], output: Path) -> None:
    """Correlation and explained share over the gradients read, of the reference's recipe and the refined start."""
    path, img_format = image_path(output, None)
    figure = new_figure((PICTURE_INCHES, 5.4), show=False)
    panels = figure.subplots(2, len(found), sharex=True, sharey="row", squeeze=False)
    for pair, (name, rows) in zip(panels.T, found.items(), strict=True):
        draw_case(pair, name, rows)
    for axes in panels.flat:
        finish_axes(axes)
        axes.get_legend().remove()  # one for all panels
    panels[0, 0].set_ylabel("correlation, validation")
    panels[1, 0].set_ylabel("explained share, held out")
    # What starts from random weights, or steps too far, may be far below.
    panels[1, 0].set_ylim(bottom=max(panels[1, 0].get_ylim()[0], LOWEST_EXPLAINED))
    figure.supxlabel("gradients read: one a step, and those of the spectral start before it", fontsize=11, color=DARK)
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, labelcolor=DARK)
    write_figure(figure, path, img_format, PICTURE_DPI, show=False)


def draw_case(pair: Sequence[Any], name: str, rows: list[Row]) -> None:
    best = next(row for row in rows if row.is_best)
    refined = next(row for row in rows if row.recipe.kind == "refined")
    for row in rows:
        if row.recipe.kind == "reference" and row is not best:
            draw_runs(pair, row, "random start, Adam at other rates", color=SKY, linewidth=0.9, zorder=1.5)
    bold = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
    draw_runs(pair, best, "random start, Adam at its best rate", color=BLUE, **bold)
    draw_runs(pair, refined, f"spectral start of {refined.recipe.items} items, then Adam", color=VERMILION, **bold)
    limit = best.mean("explained_limit")
    if limit is not None:
        pair[1].axhline(limit, color=DARK, linestyle="--", linewidth=1.2, label="most that one latent can explain")
    pair[0].set_title(f"{name}: best rate {best.recipe.arguments['learning_rate']:g}", loc="left", color=DARK)
    for axes in pair:
        axes.axhline(0.0, color=GREY, linewidth=0.8)


def draw_runs(pair: Sequence[Any], row: Row, label: str, **look: Any) -> None:
    """A line for each seed; a label is in the legend once."""
    for run in row.runs:
        for axes, series in zip(pair, (run.correlations, run.explained_by_step), strict=True):
            named = {} if label in axes.get_legend_handles_labels()[1] else {"label": label}
            axes.plot([row.recipe.items + step for step in series], list(series.values()), **look, **named)


# What is learnt: embedded models


def embedded_case(kind: str, space: dict[str, Any], directory: Path) -> Case:
    build = {"masked": demo.build_masked_lm, "causal": demo.build_causal_lm}[kind]
    return Case(kind, build(directory / kind), demo.feature_data(), demo.neutral_data(), space)


# What is learnt: TinyStories


SPLITS = {"train": 160, "validation": 40, "test": 40}
"""Rows of each class."""
TURNS = ("train", "train", "train", "validation", "test")
PEOPLE = {
    "M": ("boy", "king", "prince", "man"),
    "F": ("girl", "queen", "princess", "woman"),
}
NAMES = {
    "M": (
        "Tim", "Tom", "Ben", "Max", "Sam", "Jack", "Bob", "Billy", "Leo", "Joe", "Tommy", "Timmy", "John", "Mike",
        "Peter", "James", "Andy", "Fred", "Jim", "Johnny",
    ),
    "F": (
        "Lily", "Mia", "Sue", "Anna", "Lucy", "Amy", "Emma", "Sara", "Zoe", "Ella", "Jane", "Daisy", "Molly", "Mary",
        "Jenny", "Kate", "Sally", "Lisa", "Jill", "Sarah",
    ),
}  # fmt: skip
KINDS = ("little", "big", "kind", "happy", "young", "brave")
OPENERS = ("Once upon a time, there was", "One day, there was", "There once was", "In a small town, there lived")
MIDDLES = (
    "was happy because", "was sad because", "went to the park because", "smiled when", "ran home because",
    "felt proud because", "was so tired that", "looked in the box because", "laughed when", "was surprised when",
    "went to bed because", "was scared because", "sat under the tree because", "was so excited that",
    "stopped playing because", "cried when", "jumped up and down when", "was angry because", "waited until",
    "hid behind the tree because",
)  # fmt: skip
ENDINGS = (
    "had a new toy", "saw a big dog", "lost the ball", "wanted to play", "found a shiny rock", "could fly a kite",
    "heard a loud noise", "liked the cake", "did not want to share", "saw a bird in the sky", "could not find the cat",
    "had a lot of fun", "was hungry", "made a new friend", "won the race",
)  # fmt: skip
THINGS = (
    "the tree", "the red ball", "the small house", "the garden", "the big box", "the old car", "the river", "the cake",
    "the blue boat", "the flower", "the park", "the door", "the rain", "the toy train", "the sun",
)  # fmt: skip
LOOKS = (
    "was very big", "was very old", "looked nice", "was full of colors", "was soft and warm", "made a loud sound",
    "was near the sea", "was bright and pretty",
)  # fmt: skip
ENDS = (
    "The birds sang in the sky.", "The grass was green.", "There were many flowers.", "The wind was strong.",
    "The water was cold.", "The day was sunny and warm.",
)  # fmt: skip
NEUTRAL_TEXTS = 60


def stories_case(model: Path, space: dict[str, Any]) -> Case:
    rows = [row for name in CLASSES for split in SPLITS for row in stories(name, split)]
    return Case("stories", model, pd.DataFrame(rows), neutral_stories(), space, evaluated_rows=20, scored_texts=30)


def stories(name: str, split: str) -> list[dict[str, str]]:
    """Different rows of a class; names and endings are of this split alone.

    What stands just before the blank is not: with "because" in one split and "when" in the other the class means of
    training rows explain 0.47 of the others' targets, where means of their own explain 0.86.
    """
    other = next(found for found in CLASSES if found != name)
    parts = (
        OPENERS, KINDS, PEOPLE[name], dealt(NAMES[name], split), MIDDLES, dealt(ENDINGS, split),
    )  # fmt: skip
    found = []
    for opener, kind, person, who, middle, ending in sample(parts, SPLITS[split], f"{name} {split}"):
        text = f"{opener} a {kind} {person} named {who}. {who} {middle} [MASK] {ending}."
        row = {"masked": text, "split": split, "label": CLASSES[name], "label_class": name}
        found.append({**row, "alternative": CLASSES[other], "alternative_class": other})
    return found


def neutral_stories() -> pd.DataFrame:
    """Nobody is in them: no word that has a gender."""
    texts = [
        f"{thing.capitalize()} {look}. {end}"
        for thing, look, end in sample((THINGS, LOOKS, ENDS), NEUTRAL_TEXTS, "neutral")
    ]
    return pd.DataFrame({"text": texts})


def dealt(values: Sequence[str], split: str) -> list[str]:
    return [value for place, value in enumerate(values) if TURNS[place % len(TURNS)] == split]


def sample(parts: Sequence[Sequence[str]], count: int, seed: str) -> list[tuple[str, ...]]:
    """Different combinations."""
    return random.Random(seed).sample(list(itertools.product(*parts)), count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=["masked", "causal"], default=["masked", "causal"])
    parser.add_argument("--stories", type=Path, help="directory of a causal model of TinyStories")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--topk", type=float, help="share of the weights that is kept before training; default: all")
    parser.add_argument("--params", nargs="+", help="names or wildcards of the weights that take part; default: all")
    parser.add_argument("--json", type=Path, help="where all numbers go")
    parser.add_argument("--plot", type=Path, help="where a picture goes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="ten steps, one seed, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 10, 1
    torch.set_num_threads(options.threads)
    logging.getLogger("gradiend_dist").setLevel(logging.ERROR)  # what a recipe cannot do is in the table
    prune = None if options.topk is None else PrePruneConfig(n_samples=16, topk=options.topk, source="diff", seed=0)
    space = {"pre_prune_config": prune, "params": options.params}
    found = {}
    with tempfile.TemporaryDirectory(prefix="gradiend_convergence_") as temporary:
        directory = Path(temporary)
        cases = [embedded_case(kind, space, directory) for kind in options.model]
        if options.stories is not None:
            cases.append(stories_case(options.stories, space))
        for case in cases:
            found[case.name] = measure(case, options, directory / f"{case.name}_runs")
            print_table(case, found[case.name], options)
    if options.json is not None:
        asked = {name: getattr(options, name) for name in ("steps", "seeds", "topk", "params", "threads")}
        write_json(options.json, {**asked, **{name: [row.as_dict() for row in rows] for name, rows in found.items()}})
    if options.plot is not None:
        draw(found, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
