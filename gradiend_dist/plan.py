"""What a run will need, before it is started: steps, memory, disk space; and whether it can be had."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from gradiend_dist.arguments import TrainingArguments
from gradiend_dist.errors import UserError
from gradiend_dist.model import count_to_keep, first_line, load_base_config
from gradiend_dist.space import ParameterSpace

GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """Bytes of a run in one process."""

    full_size: int
    trained_size: int
    base_model: int
    head: int
    """Weights and moments of one seed."""
    gradients: int
    """Source and target of one item, and the importance vector of pre-pruning where that is larger."""
    model_file: int
    disk: int

    @property
    def memory(self) -> int:
        return self.base_model + self.head + self.gradients

    def lines(self) -> list[tuple[str, str]]:
        return [
            ("weights of the base model's backbone", f"{self.full_size:,}"),
            ("weights that are trained on", f"{self.trained_size:,}"),
            ("memory: base model", gib(self.base_model)),
            ("memory: encoder, decoder and moments, per seed", gib(self.head)),
            ("memory: gradients of one step", gib(self.gradients)),
            ("disk: one model / at most at once", f"{gib(self.model_file)} / {gib(self.disk)}"),
        ]


def forecast(args: TrainingArguments, space: ParameterSpace, num_base_weights: int) -> Forecast:
    n = trained = space.size
    if args.pre_prune_config is not None and args.pre_prune_config.topk is not None:
        trained = count_to_keep(args.pre_prune_config.topk, n)
    m = args.latent_dim
    entries = trained * (2 * m + int(args.bias_decoder)) + m
    kinds = len({args.source, args.target})
    gradients = 4 * trained * kinds * args.gradiend_batch_size * args.gradient_accumulation_steps
    bytes_per_weight = 4 if args.torch_dtype == "float32" else 2
    model_file = 4 * entries
    # Each seed's best and its output, and the promoted copy.
    num_kept = args.max_seeds + 2 if args.max_seeds > 1 else 2
    return Forecast(
        full_size=n,
        trained_size=trained,
        base_model=bytes_per_weight * num_base_weights,
        head=3 * 4 * entries,
        gradients=max(gradients, 8 * n if trained < n else 0),
        model_file=model_file,
        disk=model_file * num_kept,
    )


def space_of(model: str, args: TrainingArguments) -> tuple[ParameterSpace, int]:
    """The parameter space from the model's configuration alone, and the number of all its weights."""
    from gradiend_dist.objectives import is_causal

    config = load_base_config(model, trust_remote_code=args.trust_remote_code)
    kind = AutoModelForCausalLM if is_causal(config, _NoTokenizer) else AutoModelForMaskedLM
    try:
        with torch.device("meta"):
            skeleton = kind.from_config(config, trust_remote_code=args.trust_remote_code)
    except ValueError as error:
        raise UserError(f"model={model!r} is no language model that can be built: {first_line(error)}") from error
    return ParameterSpace.of_model(skeleton, args.params), sum(p.numel() for p in skeleton.parameters())


class _NoTokenizer:
    """Stands for a tokenizer where the architecture alone must tell: unknown ones are taken as masked."""

    mask_token = "[MASK]"


def check_output(name: str, path: Path, needed: int) -> None:
    """The directory of argument `name` can be made and written to, and the disk has room for what will be in it."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"{name}={path} cannot be a directory, {existing} is a file: pass another {name}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{name}={path}: {existing} cannot be written to: pass another one, or change its permissions.")
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{name}={path} needs {gib(needed)} on disk, {gib(free)} are free: free some, pass another {name}, or "
            "prune with pre_prune_config."
        )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
