"""Encoder and decoder in a DeepSpeed engine: ZeRO stage 1, 2 or 3, as the Accelerate configuration says.

Every rank is handed the same x and y, so the mean of the ranks' gradients, which DeepSpeed takes, is the gradient of a
single process. Where the weights and moments are:

    stage 1, 2   weights whole on every rank; fp32 masters, moments (and, at 2, gradients) cut in W
    stage 3      weights cut as well, and gathered for each forward and backward pass

A step moves about 6n (1, 2) or 8n (3) numbers, where `sliced.py` moves a few: this engine is for those who have to stay
with DeepSpeed, and for optimizer offload.

What one rank answers for, `owned`, is a range of each weight: its ZeRO partition at stage 3, an even share before.
Encodings and norms are sums over these ranges, so that stage 3 gathers nothing for them.

Parameter groups: the encoder, the decoder's weight, the decoder's bias, each with its own rate. All but the last change
sign with the latent axis. DeepSpeed flattens group by group, so the moments to negate are whole tensors.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import Engine, GradiendBatch, StepOptions
from gradiend_dist.engines.deepspeed_config import resolve_config
from gradiend_dist.engines.sliced import CHUNK, CHUNK_ON_GPU, square
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel
from gradiend_dist.space import Slices

if TYPE_CHECKING:
    from accelerate import Accelerator

TAG = "zero"

FACTS = "zero.json"

FORCE_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class ZeroEngine(Engine):
    """Takes over `model`, whole and with its initial weights; DeepSpeed moves it to the accelerator's device."""

    def __init__(
        self, model: ParamMappedGradiendModel, options: StepOptions, comm: Comm, accelerator: Accelerator
    ) -> None:
        assert model.slices.is_whole, "DeepSpeed cuts the weights itself"
        if model.torch_dtype != torch.float32:
            raise UserError(f"The GRADIEND model has dtype {model.torch_dtype}: DeepSpeed trains it in float32 alone.")
        self.model, self.options, self.comm = model, options, comm
        self.slices = model.slices
        config = resolve_config(accelerator, options, comm.world_size)
        self.stage: int = config["zero_optimization"]["stage"]
        gc.collect()  # what finished engines held is in cycles, and this one needs the memory
        self.groups = parameter_groups(model, options)
        optimizer = make_optimizer(self.groups, options)
        self.engine = prepare(Objective(model, options.supervised), optimizer, config, accelerator)
        check_engine(self.engine, config, comm.world_size)
        weakref.finalize(self, release, self.engine).atexit = False

    def step(self, batches: list[GradiendBatch], learning_rate: float) -> Tensor:
        for settings, group in zip(self.engine.optimizer.param_groups, self.groups, strict=True):
            settings["lr"] = learning_rate * group.rate
        loss = self.engine(*self._inputs(batches))
        # A loss that is not finite need not have such gradients. DeepSpeed skips a step whose gradient norm, of all
        # ranks, is not finite: so the loss is made to say it in the gradients.
        self.engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan))
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=loss.device)
        assert self.engine.was_step_applied() == bool(norm.isfinite()), f"a step with a gradient norm of {norm}"
        return self._report(loss.detach(), norm)

    def _inputs(self, batches: list[GradiendBatch]) -> tuple[list[Tensor], list[Tensor]]:
        first = [batch.label if self.options.supervised == "decoder" else batch.source for batch in batches]
        second = [batch.label if self.options.supervised == "encoder" else batch.target for batch in batches]
        return self._placed(first), self._placed(second)

    def _placed(self, tensors: list[Tensor | None]) -> list[Tensor]:
        return [tensor.to(self.engine.device, torch.float32) for tensor in tensors if tensor is not None]

    @torch.no_grad()
    def _report(self, loss: Tensor, norm: Tensor) -> Tensor:
        sums = torch.stack(
            [
                loss.double() / self.comm.world_size,
                self._own_square(self.model.encoder_linear.weight),
                self._own_square(self.model.decoder_linear.weight),
            ]
        )
        mean_loss, encoder_square, decoder_square = self.comm.total(sums)
        return torch.stack([mean_loss.float(), norm, encoder_square.sqrt().float(), decoder_square.sqrt().float()])

    def _own_square(self, weight: Tensor) -> Tensor:
        _, own = self.owned(weight)
        found = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for chunk in own.split(chunk_size(own.device)):
            found += square(chunk).to(found.device)
        return found

    def owned(self, weight: Tensor) -> tuple[int, Tensor]:
        """The range of a flattened weight that this rank answers for: its start, and the numbers themselves."""
        if self.stage < 3:
            flat = weight.data.view(-1)
            ((start, stop),) = Slices.even(flat.numel(), self.comm.rank, self.comm.world_size).ranges
            return start, flat[start:stop]
        partition: Tensor = weight.ds_tensor.data  # type: ignore[attr-defined]
        size: int = weight.ds_numel  # type: ignore[attr-defined]
        start = min(self.comm.rank * partition.numel(), size)
        return start, partition[: size - start]  # what lies behind is padding

    @torch.no_grad()
    def encode(self, source: Tensor) -> Tensor:
        n, m, k = self.model.input_dim, self.model.latent_dim, len(source)
        source = source.to(self.engine.device, torch.float32)
        sums = torch.zeros(k + 1, m, dtype=torch.float64, device=source.device)  # We.x of each item, and the bias
        start, own = self.owned(self.model.encoder_linear.weight)
        for piece in cut_in_rows(start, start + own.numel(), n, chunk_size(source.device)):
            row, columns = piece.start // n, slice(piece.start % n, piece.start % n + piece.stop - piece.start)
            weights = own[piece.start - start : piece.stop - start].to(source.device)
            sums[:-1, row] += source[:, columns] @ weights
        start, own = self.owned(self.model.encoder_linear.bias)
        sums[-1, start : start + own.numel()] = own.to(sums)
        sums = self.comm.total(sums).float()
        encoded: Tensor = self.model.encoder[1](sums[:-1] + sums[-1])
        return encoded

    @torch.no_grad()
    def encoding_model(self) -> GradiendModel:
        """The whole encoder, because every rank has whole gradients; at stage 3 gathered, and without a decoder."""
        if self.stage < 3:
            return self.model
        found = GradiendModel(
            self.model.input_dim,
            self.model.latent_dim,
            activation_encoder=self.model.activation_encoder,
            device=self.engine.device,
            device_decoder="meta",
            initialize=False,
        )
        with self._gathered(self.model.encoder_linear.weight) as weight:
            found.encoder_weight.copy_(weight)
        with self._gathered(self.model.encoder_linear.bias) as bias:
            found.encoder_bias.copy_(bias)
        return found

    @torch.no_grad()
    def flip(self, *, with_decoder_bias: bool) -> None:
        encoder, decoder = self.model.encoder_linear, self.model.decoder_linear
        for weight in (encoder.weight, encoder.bias, decoder.weight):
            negate(weight)
        if with_decoder_bias:
            if self.model.bias_decoder:
                negate(decoder.bias)
        else:
            for moment in self._moments_that_flip():
                moment.neg_()
        self.engine.optimizer.refresh_fp32_params()

    def _moments_that_flip(self) -> Iterator[Tensor]:
        """First moments of all groups but the bias's, this rank's part of them; none before the first step."""
        zero = self.engine.optimizer
        owners: Sequence[int] = range(len(self.groups))
        masters = zero.single_partition_of_fp32_groups if self.stage < 3 else zero.fp32_partitioned_groups_flat
        if self.stage == 3:
            owners = [zero.sub_group_to_group_id[i] for i in range(len(masters))]
        for master in [master for master, owner in zip(masters, owners, strict=True) if self.groups[owner].flips]:
            if "exp_avg" in zero.optimizer.state[master]:
                yield zero.optimizer.state[master]["exp_avg"]

    @torch.no_grad()
    def weights(self) -> ParamMappedGradiendModel:
        found = ParamMappedGradiendModel(
            self.model.space,
            self.model.latent_dim,
            slices=Slices.even(self.model.input_dim, self.comm.rank, self.comm.world_size),
            activation_encoder=self.model.activation_encoder,
            activation_decoder=self.model.activation_decoder,
            bias_decoder=self.model.bias_decoder,
            device=self.engine.device,
            initialize=False,
        )
        columns = slice(*found.slices.ranges[0])
        with self._gathered(self.model.encoder_linear.weight) as weight:
            found.encoder_weight.copy_(weight[:, columns])
        with self._gathered(self.model.encoder_linear.bias) as bias:
            found.encoder_bias.copy_(bias)
        with self._gathered(self.model.decoder_linear.weight) as weight:
            found.decoder_weight.copy_(weight[columns])
        if found.decoder_bias_vector is not None:
            with self._gathered(self.model.decoder_linear.bias) as bias:
                found.decoder_bias_vector.copy_(bias[columns])
        return found

    @contextlib.contextmanager
    def _gathered(self, weight: Tensor) -> Iterator[Tensor]:
        """The whole weight, for the time of the block: all of it on every rank, one weight at a time."""
        if self.stage < 3:
            yield weight.data
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            yield weight.data

    def save_own(self, directory: Path) -> None:
        """DeepSpeed's checkpoint: each rank writes its own files, on a file system that all ranks see."""
        self.engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        if self.comm.is_first:
            (directory / FACTS).write_text(json.dumps(self._facts()))
        self.comm.meet("saving the ZeRO state")

    def load_own(self, directory: Path) -> None:
        """Go on from what `save_own` wrote at the same world size and stage; DeepSpeed cannot cut anew."""
        if not (directory / FACTS).is_file():
            raise UserError(f"{directory} holds no {FACTS}: it is no training state of a ZeRO run, or not complete.")
        saved = json.loads((directory / FACTS).read_text())
        for name, value in self._facts().items():
            if saved.get(name) != value:
                raise UserError(
                    f"The training state in {directory} was saved with {name}={saved.get(name)} and this run has "
                    f"{value}: DeepSpeed's state cannot be cut anew, launch as before or start without it."
                )
        with plain_loading():
            path, _ = self.engine.load_checkpoint(str(directory), tag=TAG)
        assert path is not None, f"DeepSpeed found no checkpoint in {directory}"

    def _facts(self) -> dict[str, Any]:
        return {
            "world_size": self.comm.world_size,
            "zero_stage": self.stage,
            "input_dim": self.model.input_dim,
            "latent_dim": self.model.latent_dim,
            "parameter_groups": len(self.groups),
        }


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


def chunk_size(device: torch.device) -> int:
    return CHUNK_ON_GPU if device.type == "cuda" else CHUNK


def cut_in_rows(start: int, stop: int, width: int, longest: int) -> Iterator[slice]:
    """[start, stop) of a flattened matrix, in pieces that lie within one row of it."""
    while start < stop:
        end = min(stop, (start // width + 1) * width, start + longest)
        yield slice(start, end)
        start = end


def negate(weight: Tensor) -> None:
    """Change the sign wherever this rank has it: whole, or as a ZeRO-3 partition, or, while it is gathered, both."""
    if weight.data.numel():
        weight.data.neg_()
    if hasattr(weight, "ds_tensor"):
        weight.ds_tensor.data.neg_()


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
