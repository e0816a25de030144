"""From rows to two saved models, this package and the reference `gradiend` 0.2.3 one after the other: see effect.py.

Both with their default arguments: train(), evaluate_decoder(), rewrite_base_model() with an output directory for each
class. The saved models are then judged alike, on rows and texts that neither has seen.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from convergence import CLASSES
from effect_cases import Case
from rivals import Ruler, SecondTexts, WeightChange, copied, difference
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from gradiend_dist.storage.files import read_json, write_json

PACKAGES = ("gradiend_dist", "gradiend")
PHASES = ("train", "search", "rewrite")
MODEL = "base_model"


def workflow(package: str, case: Case, directory: Path) -> None:
    """In a process of its own: rows to saved models, with the time of each part."""
    # A plain relative path: the reference takes any path with "t5" or "led" in it for an encoder-decoder model's.
    os.chdir(directory)
    Path(MODEL).symlink_to(case.model)
    module = importlib.import_module(package)
    times, cpu_start = [time.perf_counter()], time.process_time()
    trainer = module.TextPredictionTrainer(
        MODEL,
        data=case.rows,
        target_classes=list(CLASSES),
        eval_neutral_data=pd.DataFrame({"text": case.search}),
        args=module.TrainingArguments(experiment_dir="runs"),
    )
    trainer.train()
    times.append(time.perf_counter())
    found = trainer.evaluate_decoder(split="validation")  # the default is the split that judges
    times.append(time.perf_counter())
    for name in CLASSES:
        trainer.rewrite_base_model(found, name, output_dir=f"rewritten/{name}")
    times.append(time.perf_counter())
    seconds = {phase: after - before for phase, before, after in zip(PHASES, times, times[1:], strict=False)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    costs = {"total": times[-1] - times[0], "cpu_seconds": time.process_time() - cpu_start, "memory": peak}
    write_json(Path("found.json"), {"seconds": seconds, **costs})


def judge(case: Case, directory: Path) -> None:
    """What the saved models of both say, and their harm."""
    trainer = case.trainer(directory / "untrained")
    base = trainer.session.base_model
    ruler = Ruler(trainer, "test", case.held_out)
    second, before = SecondTexts(ruler, case.second), copied(dict(base.named_parameters()))
    auto = AutoModelForMaskedLM if ruler.scores.asker.session.tokenizer.mask_token else AutoModelForCausalLM
    found: dict[str, Any] = {"base": dict(ruler.base)}
    for package in PACKAGES:
        found[package] = {}
        for name in CLASSES:
            saved = directory.parent / package / "rewritten" / name
            if not any(saved.rglob("config.json")):
                continue  # this package saves no model that is of no use
            path = next(iter(saved.rglob("config.json"))).parent
            change = WeightChange(base, difference(auto.from_pretrained(path), before))
            with change.at(1.0):
                trial, elsewhere = ruler.trial(name, 0.0), second.harm()
            found[package][name] = {"value": trial.value, "harm": trial.harm, "second_harm": elsewhere.value}
    write_json(directory / "found.json", found)


PARTS: dict[str, Callable[[Case, Path], None]] = {
    "gradiend_dist": lambda case, directory: workflow("gradiend_dist", case, directory),
    "gradiend": lambda case, directory: workflow("gradiend", case, directory),
    "judge": judge,
}


def compare(case: Case, directory: Path, run: Callable[[Sequence[str], Path], None]) -> dict[str, Any]:
    """Run both and print what they took and what came of it."""
    for part in PARTS:
        run(["--child", part, str(directory / "case"), str(directory / part)], directory / f"{part}.log")
    found = {part: read_json(directory / part / "found.json") for part in PARTS}
    ours, theirs = (found[package] for package in PACKAGES)
    print(f"\n{case.name}: seconds from rows to two saved models, default arguments of both")
    print(f"{'':16}{'total':>9}{''.join(f'{phase:>9}' for phase in PHASES)}    CPU s   memory MB")
    for package in PACKAGES:
        parts = "".join(f"{found[package]['seconds'][phase]:9.1f}" for phase in PHASES)
        print(
            f"{package:16}{found[package]['total']:9.1f}{parts}{found[package]['cpu_seconds']:9.1f}{found[package]['memory']:12.0f}"
        )
    faster, cpu = theirs["total"] / ours["total"], theirs["cpu_seconds"] / ours["cpu_seconds"]
    print(f"{faster:.1f} times faster ({cpu:.1f} by CPU), {ours['memory'] / theirs['memory']:.2f} of the memory")
    base = found["judge"]["base"]
    for package in PACKAGES:
        for name, entry in found["judge"][package].items():
            change = f"{CLASSES[name]} {base[name]:.3g} -> {entry['value']:.3g}"
            harms = f"harm {100 * entry['harm']:.2f} %, elsewhere {100 * entry['second_harm']:.2f} %"
            print(f"  {package}: {change}, {harms}")
    return found
