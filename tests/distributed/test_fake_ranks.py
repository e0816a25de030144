"""One rank of very many, on fake tensors (see benchmarks/dry_run.py): what it holds is its share, and nothing is n."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from dry_run import Watch, check, describe, dry_run

from gradiend_dist.space import Slices


@pytest.mark.parametrize("base", ["replicated", "fsdp2"])
@pytest.mark.parametrize("rank", [0, 5, 63])
def test_step__of_64_ranks_holds_a_64th_and_makes_no_tensor_of_size_n(base, rank):
    """Fails if the engine, its optimizer or the reduction makes a vector over the whole space."""
    found = dry_run("small", 64, base, rank)
    print(describe("small", 64, base, found))
    assert found.part < found.n / 60 and found.largest < found.n / 4
    if rank == 5:  # FSDP cuts whole rows, so that the last rank may have fewer
        check(found, 64)
    assert found.collectives["allreduce_"] == 3
    if base == "replicated":
        assert found.largest <= found.largest_weight


def test_check__refuses_a_tensor_of_size_n_and_a_rank_that_holds_too_much():
    """The check itself can fail."""
    found = dry_run("small", 64, "replicated")
    check(found, 64)
    for change in ({"largest": found.n}, {"resident": 2 * found.resident}):
        with pytest.raises(AssertionError):
            check(replace(found, **change), 64)


def test_watch__counts_what_lives_and_forgets_what_is_gone():
    with FakeTensorMode(), Watch() as watch:
        kept = torch.empty(1000)
        for _ in range(3):
            view = (kept + 1.0).view(10, 100)
        del view
    assert (watch.live, watch.largest) == (4000, 1000)
    assert watch.peak == 12000  # the new one is made before the old one goes
    assert kept.numel() == 1000


@pytest.mark.slow
@pytest.mark.parametrize("base", ["replicated", "fsdp2"])
@pytest.mark.parametrize(("model", "world_size"), [("8B", 64), ("70B", 512)])
def test_step__of_a_large_model_on_many_ranks(model, world_size, base):
    found = dry_run(model, world_size, base, rank=0)
    print(describe(model, world_size, base, found))
    check(found, world_size)
    assert found.n > 2**31


def test_part__positions_beyond_32_bits():
    n = 70_000_000_123
    parts = [Slices.even(n, rank, 512) for rank in range(512)]
    assert sum(part.size for part in parts) == n
    assert parts[-1].ranges[0][1] == n and parts[-1].ranges[0][0] > 2**31
    assert max(part.size for part in parts) < 2**31
