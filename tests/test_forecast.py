"""What gradients that are used again may take: no more than the rest of a run leaves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

from gradiend_dist import PrePruneConfig, TrainingArguments
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import Placement
from gradiend_dist.distributed.launch import Launch
from gradiend_dist.forecast import (
    OF_A_HOST,
    USABLE,
    base_of,
    left_for_store,
    need_of,
    need_with_seeds,
    rows_at_once,
    run_of,
)
from gradiend_dist.memory import Base, Need, Run, need_fsdp, need_placed, need_sliced, need_zero
from gradiend_dist.space import ParameterSpace

CPU, GPUS = torch.device("cpu"), [torch.device("cuda", number) for number in range(3)]
ON_ONE = Placement(GPUS[0], GPUS[0], GPUS[0])
ROOM = 1e12


def base() -> Base:
    model = tiny.base_model("bert", 50)
    return base_of(model, ParameterSpace.of_model(model), 4)


def run(**args: Any) -> Run:
    return run_of(base(), TrainingArguments(train_batch_size=7, **args), tokens=9)


def launch(engine: str, ranks: int, **more: Any) -> Launch:
    return Launch(engine, Comm(rank=0, world_size=ranks), **more)


def test_need_of__is_that_of_the_engine_that_was_launched():
    """Fails if the store is given what another engine would leave."""
    planned = run()
    plugin = SimpleNamespace(zero_stage=3, hf_ds_config=SimpleNamespace(is_offload=lambda: True))
    deepspeed = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    fsdp, recomputing = (
        SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(activation_checkpointing=asked)))
        for asked in (False, True)
    )
    whole_items, rows_split = replace(planned, rows=3 * 7), replace(planned, rows=3 * 3)
    assert need_of(planned, launch("placed", 1), ON_ONE, None, ROOM) == need_placed(planned, 1)
    assert need_of(planned, launch("sliced", 3), ON_ONE, None, ROOM) == need_sliced(whole_items, 3)
    sharded = launch("sliced", 3, shards_base=True, accelerator=fsdp)
    assert need_of(planned, sharded, ON_ONE, None, ROOM) == need_fsdp(rows_split, 3)
    sharded = launch("sliced", 3, shards_base=True, accelerator=recomputing)
    assert need_of(planned, sharded, ON_ONE, None, ROOM) == need_fsdp(replace(rows_split, recomputes=True), 3)
    found = need_of(planned, launch("zero", 3, accelerator=deepspeed), ON_ONE, None, ROOM)
    assert found == need_zero(rows_split, 3, 3, offload=True)
    assert need_of(planned, launch("sliced", 3), ON_ONE, 2, ROOM) == need_sliced(replace(planned, rows=3 * 2), 3)


def test_rows_at_once__are_whole_items_where_gradients_will_be_kept():
    """Fails if `plan` and a run count other rows: they split an item only where its gradients will not be kept."""
    planned, ranks = run(initialization="spectral", spectral_items=5), 3
    vectors = 4 * -(-planned.head.n // ranks) * 2 * 5
    enough = need_sliced(planned, ranks).peak + vectors
    assert rows_at_once(planned, ranks, enough) == 3 * 7
    assert rows_at_once(planned, ranks, enough - 1) == 7
    little = need_of(planned, launch("sliced", 3), ON_ONE, None, enough - 1)
    assert little == need_sliced(replace(planned, rows=3 * 3), ranks)


def test_need_with_seeds__counts_all_that_may_be_trained_at_once():
    """Fails if seeds whose training together is decided later find the memory taken by gradients."""

    def need(of: Run) -> Need:
        return need_placed(of, 1)

    args, planned = TrainingArguments(max_seeds=3), run()
    of_all = 3 * 36 * planned.head.n
    all_seeds = need(replace(planned, head=replace(planned.head, seeds=3)))
    assert need_with_seeds(need, planned, args, 2 * of_all + 1) == all_seeds
    assert need_with_seeds(need, planned, args, 2 * of_all) == need(planned)
    for one_at_a_time in (TrainingArguments(max_seeds=1), TrainingArguments(seeds_in_parallel=False)):
        assert need_with_seeds(need, planned, one_at_a_time, 1e12) == need(planned)


def test_need_of__counts_what_is_on_the_base_models_gpu_alone():
    """Fails if encoder and decoder on other GPUs take from the store, or those on the same one do not."""
    planned = run()
    placed = [Placement(*devices) for devices in ((*GPUS,), (GPUS[0], GPUS[1], GPUS[0]), (GPUS[0],) * 3)]
    alone, with_encoder, with_both = (need_of(planned, launch("placed", 1), where, None, ROOM) for where in placed)
    assert (alone.weights, alone.moments) == (0, 0)
    assert with_encoder.weights == 4 * planned.head.n and with_both.weights == 12 * planned.head.n
    assert alone.peak < with_encoder.peak < with_both.peak


def test_run_of__follows_the_arguments():
    pruned = run(pre_prune_config=PrePruneConfig(n_samples=3, topk=0.1), gradient_checkpointing=True, latent_dim=2)
    assert (pruned.head.n, pruned.head.latent_dim, pruned.rows, pruned.tokens) == (
        pytest.approx(base().n * 0.1, abs=1), 2, 7, 9,
    )  # fmt: skip
    fewer, more = (need_of(each, launch("placed", 1), ON_ONE, None, ROOM).activations for each in (pruned, run()))
    assert pruned.recomputes and fewer < more


def test_left_for_store__is_what_the_rest_leaves_and_never_negative():
    """Fails if the store is a share of what is free now, before weights and moments are there."""
    assert left_for_store(1000, 300, GPUS[0]) == int(USABLE * 1000) - 300
    assert left_for_store(1000, 300, CPU) == OF_A_HOST * 700
    assert left_for_store(1000, 2000, GPUS[0]) == left_for_store(1000, 2000, CPU) == 0
