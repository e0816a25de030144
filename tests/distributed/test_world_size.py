"""World size never changes the result: every case of world_script.py, in every way of launching, against one process.

One launch trains all cases; what it wrote is compared with what a single process wrote, file by file.

The only difference allowed is the order in which float32 numbers are added: rows of a batch are added within a rank and
then over ranks, and so are products over n. One such sum is off by about 1e-7 of its largest term, and 8 steps carry
that on. Hence TOLERANCE, a share of the largest number of each kind; decisions (entries, best step, seed) are equal.

Adam divides a gradient by its own size. Where a gradient is nothing but rounding (the keys' biases: a softmax does not
see them) its update would be rounding blown up to a full step, in a single process as well; an epsilon above such
gradients keeps these weights still, so that they do not hide what is compared. Pruned cases have none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from together import EVERY_DAY, LAUNCHES, trained
from world_script import CASES

TOLERANCE = 2e-5
# Attention on a device that is no CPU goes through other kernels, which round otherwise.
ON_GPU = 2e-4
pytestmark = pytest.mark.timeout(1200)  # a test may be the first to ask for two launches
LARGEST: dict[str, float] = {}


def marked() -> Iterator[Any]:
    for name in [launch for launch in LAUNCHES if launch != "one_process"]:
        for case in CASES:
            yield pytest.param(name, case, marks=[] if case in EVERY_DAY.get(name, ()) else pytest.mark.slow)


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
        for kind in ("explained", "explained_centred", "held_out_loss"):
            add("shares of the target", list(stats.get(kind, {}).values()))
        add("class means", [mean for means in stats.get("mean_by_class", {}).values() for mean in means.values()])
        for name, tensor in load_file(path / "model.safetensors").items():
            add(f"weights of the {name.split('.')[0]}", tensor)
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


@pytest.mark.parametrize(("launch", "case"), marked())
def test_case__has_the_result_of_one_process(launch: str, case: str) -> None:
    """Fails by a sum without some rank, by a rank's own decision, by rows that count twice, by parts mixed up, and if
    the ranks do not find each other."""
    one, many = (trained(name, case) for name in ("one_process", launch))
    found = differences(numbers(many), numbers(one))
    print(f"{launch}, {case}, largest differences: {in_words(found)}")
    for kind, value in found.items():
        if "gpu" not in launch:
            LARGEST[kind] = max(value, LARGEST.get(kind, 0.0))
    ours, theirs = decisions(many), decisions(one)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    assert all(value <= (ON_GPU if "gpu" in launch else TOLERANCE) for value in found.values()), in_words(found)


def test_launches__largest_difference_of_each_kind() -> None:
    """For the reader: what the tolerance is for. Not to the bit, or the ranks would not have shared the work."""
    if not LARGEST:
        pytest.skip("no case was trained on ranks")
    print(f"all launches and cases, largest differences: {in_words(LARGEST)}")
    assert 0.0 < max(LARGEST.values()) <= TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[] if name in EVERY_DAY["one_process"] else pytest.mark.slow)
        for name in CASES
        if name != "plain"
    ],
)
def test_case__is_about_something(case: str) -> None:
    """A case whose option has no effect would be equal for no reason; one that is `like` another must be."""
    like = CASES[case].like
    kind = "losses" if CASES[case].args.get("max_steps") != 0 else "weights of the decoder"
    ours, theirs = (numbers(trained("one_process", name))[kind] for name in (case, like or "plain"))
    apart = differences({kind: ours}, {kind: theirs})[kind]
    assert (apart <= TOLERANCE) == (like is not None), f"{kind} differ by {apart:.1e}"


def test_cases__train() -> None:
    """Equal starts would agree on any number of ranks: what is learnt must be seen, and what is kept must be used."""
    one = trained("one_process", "pruned")
    stats = json.loads((one / "model" / "training.json").read_text())["training_stats"]
    assert abs(list(stats["scores"].values())[-1]) > 0.9
    before, *_, after = ([mean for label, mean in m.items() if label != "0.0"] for m in stats["mean_by_class"].values())
    print("class means", before, "->", after)
    assert abs(after[0] - after[1]) > 3 * abs(before[0] - before[1])
    found = json.loads((one.parent / "found.json").read_text())
    assert min(found["partly_kept"]["kept"]) > 0, "some gradients are kept and some are not"
    assert found["nothing_kept"]["kept"][0] == 0 < found["plain"]["kept"][0]


def test_model__written_by_ranks_opens_in_the_reference() -> None:
    pytest.importorskip("gradiend")
    from gradiend.trainer.text.prediction.model_with_gradiend import TextPredictionModelWithGradiend

    path = trained("sliced_3", "pruned") / "model"
    theirs = TextPredictionModelWithGradiend.from_pretrained(str(path)).gradiend.state_dict()
    ours = load_file(path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
