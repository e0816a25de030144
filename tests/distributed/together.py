"""One launch of three ranks for all files that need three ranks: starting them takes longer than most of their work.

A file that is not among the collected ones has no part in it. Other numbers of ranks are launched when asked for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tiny
from launching import FSDP, HERE, ROOT, Ended, accelerate, python, torchrun
from world_script import CASES, save_models

SCRIPT = HERE / "together_script.py"
LIMIT = 480.0
# Of one launch: its name, and what it must be told to be.
LAUNCHES: dict[str, dict[str, Any]] = {
    "one_process": {"engine": "placed", "ranks": 1, "shards_base": False},
    **{f"sliced_{ranks}": {"engine": "sliced", "ranks": ranks, "shards_base": False} for ranks in (2, 3, 4)},
    **{f"fsdp_{ranks}": {"engine": "sliced", "ranks": ranks, "shards_base": True} for ranks in (2, 3)},
    **{f"zero{stage}_2": {"engine": "zero", "ranks": 2, "shards_base": False} for stage in (1, 2, 3)},
    # On pretend GPUs (see pretend_gpu.py): a single process with so many, and ranks with one each.
    **{f"on_{count}_gpus": {"engine": "placed", "ranks": 1, "shards_base": False} for count in (1, 2, 3)},
    "gpu_ranks_2": {"engine": "sliced", "ranks": 2, "shards_base": False},
}
SHARED = "sliced_3"
# The cases of world_script.py for every day; all cases in all launches are slow. Three ranks, some of them without rows
# or without entries, take one case for each thing that ranks do together:
ON_THREE_RANKS = (
    "plain",  # buckets and rows of a masked model
    "causal",  # ... of a causal one
    "pruned",  # the threshold over ranks, spaces of a tenth
    "accumulation",  # several batches in a step
    "seeds_in_lockstep",  # several engines side by side
    "enough_seeds",  # a common decision to stop, the overlap of top weights
    "seeds_pruned_each",  # a space of its own for each seed
    "post_pruned",  # the largest of all ranks
    "supervised_encoder",  # steps without targets
    "from_diff",  # differences as source
    "nothing_kept_causal",  # evaluation in forward mode
    "clipped",  # a norm over all ranks
    "latent_dim_2",  # more than one row of weights
    "two_rows",  # a rank without rows
    "micro_batches",  # passes that not all ranks need
    "two_entries",  # a rank without entries
    "one_weight",  # buckets of which most are empty
    "words_of_several_tokens",  # means over tokens, not rows
    "closed_form",  # Gram matrices over ranks, identity rows
    "refined_in_two_passes",  # the closed form without a store, rates from curvature
    "spectral_folded",  # sketches
)
# FSDP computes gradients by other hooks: what reads or keeps them.
ON_FSDP = (
    "pruned", "causal", "seeds_in_sequence", "nothing_kept", "kept_on_disk", "two_entries", "partly_kept", "refined",
)  # fmt: skip
EVERY_DAY = {
    "sliced_3": ON_THREE_RANKS,
    "fsdp_2": ON_FSDP,
    # Where devices could be mixed up or waited for: hooks of each kind of base, forward mode, sketches, one half alone.
    "on_3_gpus": (
        "pruned", "causal", "nothing_kept_causal", "spectral_folded", "supervised_encoder", "supervised_decoder",
        "clipped",
    ),
    "gpu_ranks_2": ("pruned", "causal", "accumulation", "refined", "closed_form"),
}  # fmt: skip
EVERY_DAY["one_process"] = tuple(
    name
    for name in CASES
    if any(name in cases or name in (CASES[case].like for case in cases) for cases in EVERY_DAY.values())
)

COLLECTED: set[str] = set()
"""The names of the test files of this run."""
_scratch = tempfile.TemporaryDirectory(prefix="ranks_")


@cache
def scratch() -> Path:
    return Path(_scratch.name)


@cache
def models() -> Path:
    """The base models of world_script.py, and a wide one: n numbers are far more than all else that is sent."""
    directory, tokenizer = scratch() / "models", tiny.wordpiece_tokenizer()
    save_models(directory)
    wide = tiny.base_model("bert", len(tokenizer), hidden_size=64, intermediate_size=93)
    wide.save_pretrained(directory / "wide")  # type: ignore[operator]
    tokenizer.save_pretrained(str(directory / "wide"))
    return directory


# --- what the tests ask for


def trained(launch: str, case: str) -> Path:
    """The results of one case of world_script.py."""
    return world(launch, case in EVERY_DAY.get(launch, ())) / case


@cache
def world(launch: str, every_day: bool) -> Path:
    """The results of the cases of every day, or of all others."""
    if launch == SHARED and every_day:
        results = shared() / "world"
    else:
        of_every_day = EVERY_DAY.get(launch, ())
        cases = [case for case in CASES if (case in of_every_day) == every_day]
        results = new_directory(f"{launch}_world_{every_day}")
        start(launch, [world_job(results, cases)])
    # As many single processes would agree with one perfectly.
    assert json.loads((results / "found.json").read_text())["launch"] == LAUNCHES[launch]
    return results


@cache
def of_ranks(ranks: int) -> Path:
    """Where the results of ranks_script.py are."""
    if f"sliced_{ranks}" == SHARED:
        return shared() / "ranks"
    results = new_directory(f"ranks_{ranks}")
    start(f"sliced_{ranks}", [["ranks", results]])
    return results


def found(ranks: int, check: str) -> Any:
    return json.loads((of_ranks(ranks) / f"{check}.json").read_text())


@cache
def traffic(launch: str) -> list[dict[str, Any]]:
    """What each rank has counted in traffic_script.py."""
    if launch == SHARED:
        results = shared() / "traffic"
    else:
        results = new_directory(f"traffic_{launch}")
        start(launch, [traffic_job(results)])
    return [json.loads((results / f"rank_{rank}.json").read_text()) for rank in range(LAUNCHES[launch]["ranks"])]


# --- launches

Job = list[Any]


@cache
def shared() -> Path:
    """The one launch of three ranks."""
    results = new_directory("shared")
    jobs: dict[str, list[Job]] = {
        "test_world_size": [world_job(results / "world", ON_THREE_RANKS)],
        "test_pruning_over_ranks": [["ranks", results / "ranks", "pruning"]],
        "test_weight_file": [["ranks", results / "ranks", "weight_files"]],
        "test_sliced_engine": [["ranks", results / "ranks", "engines"]],
        "test_traffic": [["ranks", results / "ranks", "memory"], traffic_job(results / "traffic")],
    }
    for name in ("world", "ranks", "traffic"):
        (results / name).mkdir()
    start(SHARED, [job for file, of_file in jobs.items() if file in COLLECTED for job in of_file])
    return results


def new_directory(name: str) -> Path:
    (scratch() / name).mkdir()
    return scratch() / name


def world_job(results: Path, cases: Any) -> Job:
    return ["world", models(), results, *cases]


def traffic_job(results: Path) -> Job:
    return ["traffic", models() / "wide", results]


def start(name: str, jobs: list[Job]) -> Ended:
    """Do the jobs in one launch; a failure of any rank is a failure here."""
    ranks, text = LAUNCHES[name]["ranks"], json.dumps(jobs, default=str)
    gpus = {"PRETEND_GPUS": name.split("_")[1 if ranks == 1 else 2]} if "gpu" in name else None
    if ranks == 1:
        return python(SCRIPT, text, environment=gpus, limit=LIMIT).require_success()
    if name.startswith("zero"):
        config = ROOT / "accelerate_configs" / f"{name.split('_')[0]}.yaml"
        return accelerate(config, SCRIPT, text, ranks=ranks, limit=LIMIT).require_success()
    # With 2 ranks rank 0 alone reads the files, with 3 each does.
    fsdp: Mapping[str, str] = {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true" if ranks == 2 else "false"}
    environment = fsdp if "fsdp" in name else gpus
    return torchrun(SCRIPT, text, ranks=ranks, limit=LIMIT, environment=environment).require_success()
