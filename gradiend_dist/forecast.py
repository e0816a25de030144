"""What a run will take: from its base model, its arguments and its launch to the formulas of memory.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.devices import Placement
from gradiend_dist.distributed.fsdp import blocks_of
from gradiend_dist.distributed.launch import Launch
from gradiend_dist.gradients.base import vector_bytes
from gradiend_dist.memory import (
    Base,
    Head,
    Need,
    Run,
    encoder_and_decoder,
    in_steps,
    need_fsdp,
    need_of_base,
    need_offloaded,
    need_placed,
    need_sliced,
    need_zero,
    share_of,
    sliced,
    together,
)
from gradiend_dist.model.entries import count_to_keep
from gradiend_dist.space import ParameterSpace

# A GPU's memory is never all ours: CUDA, NCCL and what the allocator cannot use again.
USABLE = 0.92

# A host is there for others as well.
OF_A_HOST = 0.5


def left_for_store(free: float, coming: float, device: torch.device) -> int:
    """Bytes for gradients that are used again: what is free now, less all that the run will still take beside them."""
    return max(0, int(USABLE * free - coming if device.type == "cuda" else OF_A_HOST * (free - coming)))


def base_of(model: nn.Module, space: ParameterSpace, bytes_per_weight: int) -> Base:
    """What the formulas need to know of a model, which may have no memory yet."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return Base(
        weight_sizes=tuple(weight.numel for weight in space.weights),
        total=num_weights(model),
        bytes_per_weight=bytes_per_weight,
        layer_sizes=tuple(num_weights(layer) for layer in blocks_of(model, None)),  # none: FSDP gathers it as a whole
        first_dimensions=tuple(weight.shape[0] for weight in space.weights),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
    )


def num_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def run_of(base: Base, args: TrainingArguments, tokens: int) -> Run:
    """A run of these arguments, with one seed at a time unless they ask for all together."""
    topk = None if args.pre_prune_config is None else args.pre_prune_config.topk
    head = Head(
        base.n if topk is None else count_to_keep(topk, base.n),
        args.latent_dim,
        args.bias_decoder,
        kinds=len({args.source, args.target}),
        items=args.gradiend_batch_size * args.gradient_accumulation_steps,
        seeds=args.max_seeds if args.seeds_in_parallel else 1,
        spectral_items=args.spectral_items if args.looks_at_items else 0,
    )
    return Run(
        base,
        head,
        args.train_batch_size,
        tokens,
        recomputes=args.gradient_checkpointing,
        has_steps=args.max_steps != 0,
        offloads=args.offload,
    )


def need_of(run: Run, launch: Launch, placement: Placement, micro_batch_size: int | None, room: float) -> Need:
    """Of a rank of this launch, on the device of its base model, where the run may take `room` bytes."""
    ranks = launch.comm.world_size
    run = replace(run, recomputes=run.recomputes or launch.recomputes_layers)
    if launch.engine == "sliced" and not launch.shards_base:
        run = replace(run, rows=rows_at_once(run, ranks, room))
    own = -(-run.rows // ranks)
    run = replace(run, rows=ranks * min(own, micro_batch_size or own))
    if launch.engine == "placed":
        return _need_beside_base(run, placement)
    if launch.engine == "zero":
        plugin = launch.accelerator.state.deepspeed_plugin
        return need_zero(run, plugin.zero_stage, ranks, offload=bool(plugin.hf_ds_config.is_offload()))
    return need_fsdp(run, ranks) if launch.shards_base else need_sliced(run, ranks)


def rows_at_once(run: Run, ranks: int, room: float) -> int:
    """Rows in one pass, over the ranks: where gradients will be kept, each computes whole items.

    They will not be where there is no room for those of a closed form, or of one item of each direction.
    """
    items = max(2, run.head.spectral_items)
    kept = vector_bytes(-(-run.head.n // ranks)) * run.head.kinds * items
    return ranks * run.rows if room - need_sliced(run, ranks).peak >= kept else run.rows


def need_with_seeds(need: Callable[[Run], Need], run: Run, args: TrainingArguments, free: float) -> Need:
    """The need of a run with all its seeds at once, where these may be trained together; else with those of `run`.

    They are where half of what is free holds their weights and moments (`TrainingInputs.seeds_fit_together`), and it is
    decided only when gradients are there: those must have left the room.
    """
    alone = need(run)
    if args.seeds_in_parallel is not None or args.max_seeds < 2 or args.prunes_each_seed:
        return alone
    together = need(replace(run, head=replace(run.head, seeds=args.max_seeds)))
    return together if together.weights + together.moments < free / 2 else alone


def _need_beside_base(run: Run, placement: Placement) -> Need:
    """Of a single process: encoder and decoder count where they share the base model's device."""
    if run.offloads:
        return need_offloaded(run)
    on_base = [device == placement.base_model for device in (placement.encoder, placement.decoder)]
    if all(on_base):
        return need_placed(run, gpus=1)
    head, whole = run.head, in_steps(run, sliced(run.head, run.head.n))
    vectors = sum(share for share, here in zip(encoder_and_decoder(head), on_base, strict=True) if here)
    return together(need_of_base(run), share_of(whole, head, vectors))
