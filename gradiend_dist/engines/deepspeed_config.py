"""DeepSpeed's configuration: the user's, checked, with what follows from the run's arguments."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from gradiend_dist.engines.base import StepOptions
from gradiend_dist.errors import UserError
from gradiend_dist.space import INT32_MAX

if TYPE_CHECKING:
    from accelerate import Accelerator

# Top-level keys of a DeepSpeed configuration that leave the result alone, or that are checked one by one. Anything
# else (compression, curricula, layer drop, other optimizers, ...) would change what is trained.
KNOWN_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "fp16", "bf16"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger", "flops_profiler"),
    *("communication_data_type",),
)

# Keys of zero_optimization with the only value that works here: the others round what is sent, change who holds what,
# or take the gradient norm away, and with it the gate for NaN.
ONLY_VALUES: dict[str, Any] = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "zenflow": None,
    "compute_grad_norm": True,
    # Stage 3 would replace torch.nn.functional.linear for the whole process, by one without forward-mode derivatives:
    # evaluation of the base model needs them.
    "memory_efficient_linear": False,
}


def resolve_config(accelerator: Accelerator, options: StepOptions, world_size: int) -> dict[str, Any]:
    """What DeepSpeed is started with: the user's configuration, checked, and what follows from the run's arguments."""
    plugin = accelerator.deepspeed_plugin
    if plugin is None:
        raise UserError(
            f"The launch type is {accelerator.distributed_type.value}: for ZeRO use accelerate_configs/zero1.yaml, "
            "zero2.yaml, zero3.yaml or zero3_offload.yaml."
        )
    config: dict[str, Any] = without_auto(copy.deepcopy(plugin.deepspeed_config))
    check_sections(config)
    check_zero(config)
    fixed = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        "gradient_clipping": options.max_grad_norm,  # also 0.0: left out, it would be 1.0
        "zero_force_ds_cpu_optimizer": False,
    }
    for key, value in fixed.items():
        if key in config and config[key] != value:
            raise UserError(
                f"The DeepSpeed configuration says {key}={config[key]} and the run's arguments make it {value}: "
                f'remove {key} there or write "auto".'
            )
    zero = {**config["zero_optimization"], "memory_efficient_linear": False}
    return {**config, **fixed, "zero_optimization": zero}


def without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """Accelerate fills "auto" from the model's `config`, and GRADIEND has none: DeepSpeed's defaults instead."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value != "auto"
    }


def check_sections(config: dict[str, Any]) -> None:
    for name in ("fp16", "bf16"):
        if config.get(name, {}).get("enabled", False):
            raise UserError(
                f'The launch turns on {name}, and GRADIEND is trained in float32: set mixed_precision to "no" and '
                f"remove {name} from the DeepSpeed configuration; torch_dtype is that of the base model."
            )
    if config.get("communication_data_type") not in (None, "fp32"):
        raise UserError(
            f"The DeepSpeed configuration says communication_data_type={config['communication_data_type']}, which "
            "rounds gradients: remove it."
        )
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise UserError(
                f"The DeepSpeed configuration has a section {name}: remove it, it comes from the run's arguments "
                "(optim, weight_decay, adam_beta1, learning_rate, lr_scheduler_type, ...)."
            )
    for key in config:
        if key not in KNOWN_KEYS:
            raise UserError(f"The DeepSpeed configuration has {key}, which is not supported here: remove it.")


def check_zero(config: dict[str, Any]) -> None:
    zero = config["zero_optimization"]
    if zero.get("stage") not in (1, 2, 3):
        raise UserError(
            f"The DeepSpeed configuration has ZeRO stage {zero.get('stage')}, which cuts nothing: use stage 1, 2 or 3, "
            "or launch with accelerate_configs/multi_gpu.yaml."
        )
    for name in ("offload_optimizer", "offload_param"):
        device = (zero.get(name) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            raise UserError(f"{name} to {device} is not supported: use cpu or none.")
    if zero["stage"] < 3 and (zero.get("offload_param") or {}).get("device", "none") != "none":
        raise UserError("offload_param needs ZeRO stage 3: use offload_param_device none, or zero_stage 3.")
    for key, only in ONLY_VALUES.items():
        if zero.get(key, only) != only:
            raise UserError(f"zero_optimization.{key}={zero[key]} is not supported here: remove it.")


def fits_zero(n: int, latent_dim: int) -> bool:
    """Can DeepSpeed's engine train an encoder over n entries? It cuts no product, and cuBLAS counts in 32 bits."""
    return n * latent_dim <= INT32_MAX
