"""What ranks send each other and hold: per step the gradients of the base once, and a few numbers; n nowhere.

Every collective of the process is seen on its way through torch's dispatcher, FSDP's included. The training state goes
through torch.distributed.checkpoint in a thread of its own and is not seen; its tensors are written, not sent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_script import memory
from together import found, traffic
from traffic_script import BUCKET, KINDS

from gradiend_dist.distributed.comm import Comm

LAUNCHES = [
    "sliced_3",
    pytest.param("sliced_2", marks=pytest.mark.slow),
    pytest.param("fsdp_2", marks=pytest.mark.slow),
]
# The latent; the loss and its derivative; the norms of the weights. Several items: also the norm of dWe, a mixture.
ALL_REDUCES = {1: 3, 3: 4}
# Of all that is no gradient: numbers of a step, decisions, metrics of an evaluation as a pickle.
SMALL_BYTES = 4096
"""Of the base model below: feed-forward layers. One such weight may top up a bucket."""
MARGIN = 0.02
"""Of peak memory: work areas that do not grow with n, and parts that differ by one."""


def launched(name: str) -> list[dict[str, Any]]:
    """What each rank has counted."""
    kind, ranks = name.split("_")
    counted = traffic(name)
    assert all((one["ranks"], one["shards_base"]) == (int(ranks), kind == "fsdp") for one in counted)
    assert sum(one["part"] for one in counted) == counted[0]["n"]
    return counted


def named(seen: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [one for one in seen if one["name"] in names]


@pytest.mark.parametrize("num_items", [1, 3])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_step__moves_each_gradient_once_and_a_few_numbers(launch: str, num_items: int) -> None:
    """Fails by a second reduction, by a gather of anything, by a further round trip in a step."""
    for rank in launched(launch):
        seen = rank[f"{num_items} items"]
        gradients = named(seen["gradients"], "reduce_scatter_", "_reduce_scatter_base_")
        wanted = num_items * len(KINDS)
        given, received = (sum(one[side] for one in gradients) for side in ("given", "received"))
        print(
            f"{launch}: {len(gradients)} reduce-scatters of {given} entries in all, n is {rank['n']}, {wanted} vectors"
        )
        assert all(one["floats"] for one in gradients)
        if rank["shards_base"]:
            # FSDP pads a weight to rows that all ranks have; it gathers weights of one layer at a time.
            assert wanted * rank["n"] <= given <= 1.02 * wanted * rank["n"]
            gathers = named(seen["gradients"], "_allgather_base_")
            assert len(gradients) + len(gathers) == len(seen["gradients"])
            assert all(one["received"] < 0.5 * rank["n"] for one in gathers)
        else:
            assert (given, received) == (wanted * rank["n"], wanted * rank["part"])
            assert len(gradients) == len(seen["gradients"]) >= 4 * wanted, "in several buckets, and nothing else"
            assert all(one["given"] <= BUCKET for one in gradients)
        assert [one["name"] for one in seen["step"]] == ["allreduce_"] * ALL_REDUCES[num_items]
        # A product and a sum for each item, of one the square of x; the loss and the squares of two gradients, and of
        # two halves.
        assert sum(one["given"] for one in seen["step"]) <= 5 + 3 * num_items


@pytest.mark.parametrize("run", ["kept", "streamed"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_run__gathers_nothing_of_size_n(launch: str, run: str) -> None:
    """Training, evaluations, checkpoints and the promoted model; gradients of evaluations are kept, or weighed as they
    arrive. Fails if weights or gradients are put together on a rank."""
    for rank in launched(launch):
        seen = rank[run]
        of_gradients = named(seen, "reduce_scatter_", "_reduce_scatter_base_", "alltoall_base_", "_allgather_base_")
        small = [one for one in seen if one not in of_gradients]
        largest, largest_small = (max(one["bytes"] for one in some) for some in (of_gradients, small))
        print(f"{launch}, {run}: at most {largest_small} bytes at once, of gradients {largest}; n is {rank['n']}")
        assert {one["name"] for one in small} <= {"allreduce_", "broadcast_", "allgather_"}
        assert largest_small <= SMALL_BYTES < rank["n"] / 10
        if not rank["shards_base"]:
            assert not named(seen, "_allgather_base_")
            exchanged = named(seen, "alltoall_base_")
            assert exchanged and all(one["received"] <= BUCKET for one in exchanged), "of all ranks together"


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
def test_memory__of_a_rank_falls_as_the_number_of_ranks_grows(tmp_path: Path, ranks: int) -> None:
    """Weights, moments, x, y, all that a step, an evaluation and a saved file need. Fails if any is whole on a rank."""
    alone, shared = memory(Comm(), tmp_path), found(ranks, "memory")
    n = sum(shared["parts"])
    print(f"peak bytes per rank and entry of n: {alone['peaks'][0] / n:.2f} alone; {ranks} ranks: "
          + ", ".join(f"{peak / n:.2f}" for peak in shared["peaks"]))  # fmt: skip
    assert alone["peaks"][0] >= 44 * n, "weights and two moments of We, Wd and bd, x and y: or something is not seen"
    assert max(shared["peaks"]) <= alone["peaks"][0] / ranks * (1 + MARGIN)
    assert alone["left"] == [0] and shared["left"] == [0] * ranks
