"""Starting, checking and ending a DeepSpeed engine, by way of Accelerate; what it optimizes."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradiend_dist.engines.base import StepOptions
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import GradiendModel

# DeepSpeed calls torch.load without `weights_only`: this makes torch refuse pickles that may run code.
FORCE_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class Objective(nn.Module):
    """The loss over all batches of a step, as one forward pass: DeepSpeed wants one backward pass for each."""

    def __init__(self, model: GradiendModel, supervised: str | None) -> None:
        super().__init__()
        self.model = model
        self.supervised = supervised

    def forward(self, inputs: list[Tensor], targets: list[Tensor]) -> Tensor:
        losses = [nn.functional.mse_loss(self._predict(x), target) for x, target in zip(inputs, targets, strict=True)]
        return torch.stack(losses).mean()

    def _predict(self, x: Tensor) -> Tensor:
        # Submodules, not `forward_encoder`: at stage 3 a weight has no content until its module is called.
        latent = x if self.supervised == "decoder" else self.model.encoder(x)
        found: Tensor = latent if self.supervised == "encoder" else self.model.decoder(latent)
        return found


# --- building the engine


@dataclass(frozen=True)
class Group:
    """Weights that DeepSpeed flattens together."""

    weights: list[Tensor]
    rate: float
    epsilon: float
    flips: bool
    """Does it change its sign with the latent axis?"""


def parameter_groups(model: GradiendModel, options: StepOptions) -> list[Group]:
    """Those of the trained half; the other half gets no gradients."""
    model.encoder.requires_grad_(options.supervised != "decoder")
    model.decoder.requires_grad_(options.supervised != "encoder")
    encoder, decoder, rates = model.encoder_linear, model.decoder_linear, options.rates
    groups = [
        Group([encoder.weight, encoder.bias], rates.encoder, rates.encoder_epsilon, flips=True),
        Group([decoder.weight], rates.decoder, rates.decoder_epsilon, flips=True),
    ]
    if model.bias_decoder:
        groups.append(Group([decoder.bias], rates.decoder, rates.decoder_epsilon, flips=False))
    return [group for group in groups if group.weights[0].requires_grad]


def make_optimizer(groups: Sequence[Group], options: StepOptions) -> torch.optim.Optimizer:
    """torch's Adam or AdamW; the learning rate comes with each step."""
    if options.optim not in ("adamw", "adam"):
        raise UserError(f"optim={options.optim} does not work with DeepSpeed: pass optim=adamw, or launch without it.")
    if options.moments_dtype != "float32":
        raise UserError(
            f"moments_dtype={options.moments_dtype} does not work with DeepSpeed, which keeps its own moments: leave "
            "it out, or launch without DeepSpeed."
        )
    kind = torch.optim.AdamW if options.optim == "adamw" else torch.optim.Adam
    own = [{"params": group.weights, "eps": group.epsilon} for group in groups]
    return kind(own, lr=1.0, betas=options.betas, weight_decay=options.weight_decay, fused=True)


def prepare(module: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], accelerator: Any) -> Any:
    """A DeepSpeed engine by way of Accelerate, and not tied to it.

    Accelerate reads the plugin's configuration, keeps every engine alive, and takes the first one for its own
    `backward`. Several seeds, each with an engine and settings of its own, need neither.
    """
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    plugin = accelerator.deepspeed_plugin
    before = plugin.hf_ds_config, plugin.deepspeed_config
    plugin.hf_ds_config = HfDeepSpeedConfig(config)
    plugin.deepspeed_config = plugin.hf_ds_config.config
    try:
        engine, prepared = accelerator.prepare(module, optimizer)
    finally:
        plugin.hf_ds_config, plugin.deepspeed_config = before
    accelerator._models.remove(engine)
    accelerator._optimizers.remove(prepared)
    accelerator.deepspeed_engine_wrapped = None
    return engine


def release(engine: Any) -> None:
    """Let go of a finished engine, so that the garbage collector can have its weights and moments.

    Its hooks live in autograd's nodes, where the collector does not see that they are a cycle: `destroy` removes them.
    Stage 3 keeps engines in two more places for as long as the process lives: the stack of modules in their forward
    pass, whose lowest entries are all roots ever made, and a cache over the arguments of a method, with its `self`.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine.destroy()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not engine.module]
    cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


def check_engine(engine: Any, config: dict[str, Any], world_size: int) -> None:
    """Accelerate and DeepSpeed both fill in, drop and replace settings without a word: what counts is what came out."""
    from deepspeed import DeepSpeedEngine

    assert isinstance(engine, DeepSpeedEngine), f"Accelerate made a {type(engine).__name__}, no DeepSpeed engine"
    found = {
        "stage": engine.zero_optimization_stage(),
        "world size": engine.dp_world_size,
        "clipping": (engine.gradient_clipping(), engine.optimizer.clip_grad),
        "micro batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "16 bits": engine.fp16_enabled() or engine.bfloat16_enabled(),
        "optimizer": type(engine.optimizer.optimizer) in (torch.optim.Adam, torch.optim.AdamW),
    }
    expected = {
        "stage": config["zero_optimization"]["stage"],
        "world size": world_size,
        "clipping": (config["gradient_clipping"],) * 2,
        "micro batch": 1,
        "accumulation": 1,
        "16 bits": False,
        "optimizer": True,
    }
    assert found == expected, f"DeepSpeed runs with {found}, asked for was {expected}"


@contextlib.contextmanager
def plain_loading() -> Iterator[None]:
    """DeepSpeed reads its checkpoints as pickles that may run code: here only tensors and its own plain classes."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(FORCE_SAFE)
    os.environ[FORCE_SAFE] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        os.environ.pop(FORCE_SAFE) if before is None else os.environ.update({FORCE_SAFE: before})
