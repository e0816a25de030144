"""World size never changes the result: every case of world_script.py, in every way of launching, against one process.

One launch trains all cases; what it wrote is compared with what a single process wrote, file by file.

The only difference allowed is the order in which float32 numbers are added: rows of a batch are added within a rank and
then over ranks, and so are products over n. One such sum is off by about 1e-7 of its largest term, and 8 steps carry it
on. Hence TOLERANCE, as a share of the largest number of each kind; decisions (pruned entries, best step, seed) are equal.

Adam divides a gradient by its own size. Where a gradient is nothing but rounding (the keys' biases: a softmax does not
see them) its update would be rounding blown up to a full step, in a single process as well; an epsilon above such
gradients keeps these weights still, so that they do not hide what is compared. Pruned cases have none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import FSDP, HERE, ROOT, Ended, accelerate, python, torchrun
from safetensors.torch import load_file
from world_script import CASES, save_models

TOLERANCE = 2e-5
LIMIT = 280.0
SCRIPT = HERE / "world_script.py"
# Of one launch: its name, and what it must be told to be.
LAUNCHES: dict[str, dict[str, Any]] = {
    **{f"sliced_{ranks}": {"engine": "sliced", "ranks": ranks, "shards_base": False} for ranks in (2, 3, 4)},
    **{f"fsdp_{ranks}": {"engine": "sliced", "ranks": ranks, "shards_base": True} for ranks in (2, 3)},
    **{f"zero{stage}_2": {"engine": "zero", "ranks": 2, "shards_base": False} for stage in (1, 2, 3)},
}
# One of each engine is for every day; the others differ from it by a number.
EVERY_DAY = ("sliced_3", "fsdp_2")
MARKED = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in LAUNCHES]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("world_size")
    save_models(directory / "models")
    return directory


@cache
def launched(scratch: Path, name: str) -> Path:
    """The results of a launch."""
    results = scratch / name
    results.mkdir()
    start(name, scratch / "models", results).require_success()
    return results


def start(name: str, models: Path, results: Path) -> Ended:
    if name == "one_process":
        return python(SCRIPT, models, results, limit=LIMIT)
    ranks = LAUNCHES[name]["ranks"]
    if name.startswith("zero"):
        config = ROOT / "accelerate_configs" / f"{name.split('_')[0]}.yaml"
        return accelerate(config, SCRIPT, models, results, ranks=ranks, limit=LIMIT)
    # With 2 ranks rank 0 alone reads the files, with 3 each does.
    fsdp = {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true" if ranks == 2 else "false"}
    return torchrun(SCRIPT, models, results, ranks=ranks, limit=LIMIT, environment=fsdp if "fsdp" in name else None)


# --- what a launch has found


def numbers(directory: Path) -> dict[str, torch.Tensor]:
    """All that may differ by rounding, by kind: each over all steps, classes and seeds."""
    found: dict[str, list[torch.Tensor]] = {}

    def add(kind: str, values: Any) -> None:
        found.setdefault(kind, []).append(torch.as_tensor(values, dtype=torch.float64).reshape(-1))

    for path in model_directories(directory):
        record = json.loads((path / "training.json").read_text())
        stats = record["training_stats"]
        add("losses", record["losses"])
        for kind, name in {"grad norms": "grad_norms", "correlations": "scores", "encoder norms": "encoder_norms",
                           "decoder norms": "decoder_norms"}.items():  # fmt: skip
            add(kind, list(stats[name].values()))
        add("class means", [mean for means in stats.get("mean_by_class", {}).values() for mean in means.values()])
        for name, tensor in load_file(path / "model.safetensors").items():
            add(name.replace(".0.linear", ""), tensor)
    evaluated = json.loads((directory.parent / "found.json").read_text())[directory.name]["evaluated"]
    add("evaluation", [value for _, value in leaves(evaluated) if isinstance(value, float)])
    return {kind: torch.cat(values) for kind, values in found.items()}


def decisions(directory: Path) -> dict[str, Any]:
    """All that must be the same."""
    found: dict[str, Any] = {"directories": [str(p.relative_to(directory)) for p in model_directories(directory)]}
    for path in model_directories(directory):
        record = json.loads((path / "training.json").read_text())
        where = str(path.relative_to(directory))
        found[f"{where}: best step"] = record["best_score_checkpoint"]["global_step"]
        found[f"{where}: verdict"] = [record["convergence_info"][name] for name in ("converged", "convergent_count")]
        found[f"{where}: steps"] = [*record["training_stats"]["scores"]], len(record["losses"])
        found[f"{where}: learning rates"] = [*record["training_stats"]["learning_rates"].values()]
        found[f"{where}: mapping"] = json.loads((path / "config.json").read_text())["mapping"]
        for name in ("mapping_indices.safetensors", "mapping_masks.safetensors"):
            if (path / name).exists():
                found[f"{where}: {name}"] = {k: v.tolist() for k, v in sorted(load_file(path / name).items())}
    report = directory / "seeds" / "seed_report.json"
    if report.exists():
        same = ("best_seed", "seeds_tried", "convergent_seeds", "best_seed_selection_strategy", "early_stop_reason")
        told = json.loads(report.read_text())
        found |= {name: told[name] for name in same}
        found["stability"] = [
            (path, value) for path, value in leaves(told.get("topk_stability", {})) if "output_dir" not in path
        ]
        found["verdicts"] = [
            [run[name] for name in ("seed", "converged", "best_checkpoint_global_step")] for run in told["runs"]
        ]
    return found


def model_directories(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.rglob("model.safetensors"))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from leaves(tree[name], f"{path}.{name}")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{path}[{number}]")
    else:
        yield path, tree


def differences(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each kind, as a share of its largest number; infinite where it cannot be compared."""
    found = {}
    for kind in [*expected, *(kind for kind in actual if kind not in expected)]:
        ours, theirs = actual.get(kind), expected.get(kind)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            found[kind] = math.inf
            continue
        if not theirs.numel():
            continue  # a case without evaluation has no correlations
        same_gaps = torch.equal(ours.isnan(), theirs.isnan())
        apart, size = (each.abs().nan_to_num(0.0).max().item() for each in (ours - theirs, theirs))
        found[kind] = (apart / size if size else float(apart > 0)) if same_gaps else math.inf
    return found


def in_words(found: dict[str, float]) -> str:
    return ", ".join(f"{kind} {value:.1e}" for kind, value in found.items())


# --- the tests


@pytest.mark.parametrize("launch", MARKED)
def test_launch__is_what_it_is_called(scratch: Path, launch: str) -> None:
    """Fails if ranks do not find each other: as many single processes would agree with one perfectly."""
    results = launched(scratch, launch)
    assert json.loads((results / "found.json").read_text())["launch"] == LAUNCHES[launch]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", MARKED)
def test_case__has_the_result_of_one_process(scratch: Path, launch: str, case: str) -> None:
    """Fails by a sum without some rank, by a rank's own decision, by rows that count twice, by parts mixed up."""
    one, many = (launched(scratch, name) / case for name in ("one_process", launch))
    found = differences(numbers(many), numbers(one))
    print(f"{launch}, {case}, largest differences: {in_words(found)}")
    ours, theirs = decisions(many), decisions(one)
    assert {k: v for k, v in ours.items() if v != theirs.get(k)} == {k: v for k, v in theirs.items() if v != ours.get(k)}
    assert all(value <= TOLERANCE for value in found.values()), in_words(found)


@pytest.mark.parametrize("launch", MARKED)
def test_launch__largest_difference_of_each_kind(scratch: Path, launch: str) -> None:
    """For the reader: what the tolerance is for. Not to the bit, or the ranks would not have shared the work."""
    largest: dict[str, float] = {}
    for case in CASES:
        one, many = (numbers(launched(scratch, name) / case) for name in ("one_process", launch))
        for kind, value in differences(many, one).items():
            largest[kind] = max(value, largest.get(kind, 0.0))
    print(f"{launch}, all cases, largest differences: {in_words(largest)}")
    assert 0.0 < max(largest.values()) <= TOLERANCE, in_words(largest)


@pytest.mark.parametrize("case", [name for name in CASES if name != "plain"])
def test_case__is_about_something(scratch: Path, case: str) -> None:
    """A case whose option has no effect would be equal for no reason; one that is `like` another must be."""
    like = CASES[case].like
    results = launched(scratch, "one_process")
    ours, theirs = numbers(results / case), numbers(results / (like or "plain"))
    apart = max(differences({"losses": ours["losses"]}, {"losses": theirs["losses"]}).values())
    assert (apart <= TOLERANCE) == (like is not None), f"losses differ by {apart:.1e}"


def test_cases__train(scratch: Path) -> None:
    """Equal starts would agree on any number of ranks: what is learnt must be seen."""
    record = json.loads((launched(scratch, "one_process") / "plain" / "model" / "training.json").read_text())
    assert record["losses"][-1] < 0.9 * record["losses"][0]
    kept = json.loads((launched(scratch, "one_process") / "found.json").read_text())["partly_kept"]["kept"]
    assert min(kept) > 0, "some gradients are kept and some are not"
