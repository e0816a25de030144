"""When is an earlier result still the result of this command? Exactly when nothing that it depends on has changed."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.storage.layout import WEIGHTS
from gradiend_dist.storage.model_dir import is_model_directory
from gradiend_dist.storage.records import find_training

logger = logging.getLogger(__name__)

# Arguments that say where results go and how the work is done, not what comes out.
WITHOUT_EFFECT = (
    "experiment_dir", "output_dir", "use_cache", "logging_steps", "eval_batch_size", "device", "device_encoder",
    "device_decoder", "device_base_model", "encoder_decoder_same_device", "use_cached_gradients", "gradient_store_gib",
    "seeds_in_parallel", "base_micro_batch_size", "metadata", "saved_seed_runs", "keep_seed_runs", "delete_models",
    "fail_on_non_convergence", "seed_runs_dir", "seed_stability_topk", "seed_stability_part",
    "analyze_seed_stability", "trust_remote_code", "save_total_limit", "resume", "ddp_timeout", "decoder_eval_lrs",
    "decoder_eval_feature_factors", "decoder_eval_max_size_training_like", "decoder_eval_max_size_neutral",
    "report_to", "run_name", "wandb_project", "wandb_entity", "wandb_group", "wandb_tags", "wandb_notes",
    "wandb_seed_runs", "wandb_log_model", "only_seed", "select_only", "gradient_checkpointing",
)  # fmt: skip

# Seeds themselves do not depend on how many of them there are, nor on when a further one is not needed.
WITHOUT_EFFECT_ON_A_SEED = (
    "max_seeds", "min_convergent_seeds", "seed_selection_eval_max_size", "convergent_score_threshold",
    "convergence_threshold", "convergent_mean_by_class_threshold",
)  # fmt: skip

# What results of before there was a choice do not say.
NOT_RECORDED = {"initialization": "random", "attn_implementation": None, "tf32": False}

# The reference compares its own form of these two, all fields of it, before it reuses a directory of ours.
PRUNING_IN_REFERENCE: dict[str, dict[str, Any]] = {
    "pre_prune_config": {
        "batch_size": 8,
        "feature_class_key": "feature_class_id",
        "target_feature_class_ids": None,
        "dataset": None,
        "use_cached_gradients": False,
        "use_streaming": None,
    },
    "post_prune_config": {"mask": None, "inplace": True, "return_mask": False},
}

_SAMPLE = 2**20

# Entries that are hashed together: their places and products are 64-bit.
_HASHED = 2**17


def training_fingerprint(args: TrainingArguments, data_hash: str, model: str) -> dict[str, Any]:
    """All that a training result depends on, by name, so that a difference can be named."""
    without = WITHOUT_EFFECT if args.looks_at_items else (*WITHOUT_EFFECT, "spectral_items")
    arguments = {name: value for name, value in args.to_dict().items() if name not in without}
    arguments["initialization"] = "spectral" if args.starts_trained else "random"
    for name, rest in PRUNING_IN_REFERENCE.items():
        if arguments[name] is not None:
            arguments[name] = {**rest, **arguments[name]}
    return {
        **arguments,
        **_python_only(args),
        "data": data_hash,
        "base_model": model,
        "base_model_files": model_files_hash(model),
    }


def _python_only(args: TrainingArguments) -> dict[str, Any]:
    """What no file can hold: a mask by its content; a function by its address, so that no other process reuses it."""
    mask = args.post_prune_config.mask if args.post_prune_config is not None else None
    return {
        "post_prune_mask": None if mask is None else hashlib.sha256(mask.cpu().numpy().tobytes()).hexdigest()[:32],
        "evaluate_fn": None if args.evaluate_fn is None else repr(args.evaluate_fn),
    }


def model_files_hash(model: str) -> str | None:
    """Hash of a local base model: its small files whole, of large ones the size, the start and the end.

    Weights of gigabytes are not read for it; a fine-tuned copy differs in all of its blocks.
    """
    path = Path(model)
    if not path.is_dir():
        return None  # a hub id stands for itself
    digest = hashlib.sha256()
    for file in sorted(item for item in path.iterdir() if item.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:32]


def content_hash(model: GradiendModel, comm: Comm) -> str:
    """Hash of a model's weights: the same however they are cut over the ranks. All ranks call this.

    Each entry's bits, mixed with its place and summed modulo 2^64: sums have no order.
    """
    slices, m = model.slices, model.latent_dim
    tensors = [(row, 1) for row in model.encoder_weight] + [(model.decoder_weight.reshape(-1), m)]
    if model.decoder_bias_vector is not None:
        tensors.append((model.decoder_bias_vector, 1))
    sums = []
    for tensor, width in tensors:
        total = torch.zeros((), dtype=torch.int64)
        for own, there in slices.range_pairs():
            for start in range(own.start * width, own.stop * width, _HASHED):
                stop = min(start + _HASHED, own.stop * width)
                place = torch.arange(start, stop) + (there.start - own.start) * width
                total += _mixed(tensor[start:stop].float().cpu().view(torch.int32).long(), place).sum()
        sums.append(total)
    found = torch.stack(sums)
    if not slices.is_whole:
        comm.total_on_host(found)
    same = torch.cat([found, model.encoder_bias.float().cpu().view(torch.int32).long()])
    return hashlib.sha256(same.numpy().tobytes()).hexdigest()[:32]


def _mixed(bits: Tensor, place: Tensor) -> Tensor:
    """Integers overflow as they should here: the multipliers are odd, so nothing is lost."""
    mixed = (bits ^ (place * 0x2545F4914F6CDD1D)) * 0x369DEA0F31A53F85
    return (mixed ^ (mixed >> 29)) * (2 * place + 1)


def text_hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]


def reusable(path: Path, wanted: dict[str, Any], use_cache: bool | str, *, of_one_seed: bool = False) -> bool:
    """May the model at `path` stand for the one that would be trained? If not, the log says why."""
    if not use_cache or not is_model_directory(path) or not (path / WEIGHTS).exists():
        return False
    if use_cache == "always":
        return True
    record = find_training(path)
    ignored = WITHOUT_EFFECT_ON_A_SEED if of_one_seed else ()
    found = {**NOT_RECORDED, **record.get("cache_fingerprint", {})}
    changed = [name for name in wanted if name not in ignored and found.get(name) != _as_json(wanted[name])]
    if changed:
        name = changed[0]
        logger.info(
            "%s is not reused: %s was %s, now %s%s",
            path,
            name,
            found.get(name, "not recorded"),
            wanted[name],
            f" ({len(changed) - 1} more differ)" if len(changed) > 1 else "",
        )
        return False
    if use_cache == "only_convergent" and not record.get("convergence_info", {}).get("converged"):
        logger.info("%s is not reused: it did not converge", path)
        return False
    return True


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value
