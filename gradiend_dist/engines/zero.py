"""Encoder and decoder in a DeepSpeed engine: ZeRO stage 1, 2 or 3, as the Accelerate configuration says.

Every rank is handed the same x and y, so the mean of the ranks' gradients, which DeepSpeed takes, is the gradient of a
single process. Where the weights and moments are:

    stage 1, 2   weights whole on every rank; fp32 masters, moments (and, at 2, gradients) cut in W
    stage 3      weights cut as well, and gathered for each forward and backward pass

A step moves about 6n (1, 2) or 8n (3) numbers, where `sliced.py` moves a few: this engine is for those who have to stay
with DeepSpeed, and for optimizer offload.

Norms are sums over what each rank answers for, so that stage 3 gathers nothing for them.

Parameter groups: the encoder, the decoder's weight, the decoder's bias, each with its own rate. All but the last change
sign with the latent axis. DeepSpeed flattens group by group, so the moments to negate are whole tensors.
"""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import Engine, GradiendBatch, StepOptions
from gradiend_dist.engines.chunks import chunks, square
from gradiend_dist.engines.deepspeed_config import resolve_config
from gradiend_dist.engines.deepspeed_engine import (
    Objective,
    check_engine,
    make_optimizer,
    parameter_groups,
    plain_loading,
    prepare,
    release,
)
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import GradiendModel, ParamMappedGradiendModel
from gradiend_dist.space import Slices
from gradiend_dist.storage.layout import STATE_ZERO, STATE_ZERO_FACTS

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        """As `Engine.step`. All ranks call this."""
        for settings, group in zip(self.engine.optimizer.param_groups, self.groups, strict=True):
            settings["lr"] = learning_rate * group.rate
        loss = self.engine(*self._inputs(batches))
        # A loss that is not finite need not have such gradients. DeepSpeed skips a step whose gradient norm, of all
        # ranks, is not finite: so the loss is made to say it in the gradients.
        self.engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan))
        self.engine.step()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=loss.device)
        assert self.engine.was_step_applied() == bool(norm.isfinite()), f"a step with a gradient norm of {norm}"
        squares = [self._own_square(half.weight) for half in (self.model.encoder_linear, self.model.decoder_linear)]
        mean_loss, *squares = self.comm.total(torch.stack([loss.detach().double() / self.comm.world_size, *squares]))
        return torch.stack([mean_loss.float(), norm, *(total.sqrt().float() for total in squares)])

    def _inputs(self, batches: list[GradiendBatch]) -> tuple[list[Tensor], ...]:
        """What the trained half reads and what it is compared with, on the engine's device."""
        read = [batch.label if self.options.supervised == "decoder" else batch.source for batch in batches]
        wanted = [batch.label if self.options.supervised == "encoder" else batch.target for batch in batches]
        return tuple(
            [tensor.to(self.engine.device, torch.float32) for tensor in tensors if tensor is not None]
            for tensors in (read, wanted)
        )

    @torch.no_grad()
    def _own_square(self, weight: Tensor) -> Tensor:
        """Sum of squares of what this rank answers for: its ZeRO partition at stage 3, an even share before."""
        if self.stage == 3:
            partition: Tensor = weight.ds_tensor.data  # type: ignore[attr-defined]
            size: int = weight.ds_numel  # type: ignore[attr-defined]
            own = partition[: size - min(self.comm.rank * partition.numel(), size)]  # what lies behind is padding
        else:
            own = Slices.even(weight.numel(), self.comm.rank, self.comm.world_size).take(weight.data.view(-1))
        found = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for chunk in chunks(own.numel(), own.device):
            found += square(own[chunk]).to(found.device)
        return found

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
        """First moments of all groups but the bias's, this rank's share of them; none before the first step."""
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
        """As of every engine: all ranks call this, since stage 3 gathers what it hands out."""
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
        """The whole weight, for the time of the block. All ranks enter it together: at stage 3 each gets all of it."""
        if self.stage < 3:
            yield weight.data
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            yield weight.data

    def save_own(self, directory: Path) -> None:
        """DeepSpeed's checkpoint: each rank writes its own files, on a file system that all ranks see."""
        self.engine.save_checkpoint(str(directory), tag=STATE_ZERO, save_latest=False)
        if self.comm.is_first:
            (directory / STATE_ZERO_FACTS).write_text(json.dumps(self._facts()))
        self.comm.meet("saving the ZeRO state")

    def load_own(self, directory: Path) -> None:
        """Go on from what `save_own` wrote at the same world size and stage; DeepSpeed cannot cut anew."""
        if not (directory / STATE_ZERO_FACTS).is_file():
            raise UserError(
                f"{directory} holds no {STATE_ZERO_FACTS}: it is no training state of a ZeRO run, or not complete."
            )
        saved = json.loads((directory / STATE_ZERO_FACTS).read_text())
        for name, value in self._facts().items():
            if saved.get(name) != value:
                raise UserError(
                    f"The training state in {directory} was saved with {name}={saved.get(name)} and this run has "
                    f"{value}: DeepSpeed's state cannot be cut anew, launch as before or start without it."
                )
        with plain_loading():
            path, _ = self.engine.load_checkpoint(str(directory), tag=STATE_ZERO)
        assert path is not None, f"DeepSpeed found no checkpoint in {directory}"

    def _facts(self) -> dict[str, Any]:
        return {
            "world_size": self.comm.world_size,
            "zero_stage": self.stage,
            "input_dim": self.model.input_dim,
            "latent_dim": self.model.latent_dim,
            "parameter_groups": len(self.groups),
        }


def negate(weight: Tensor) -> None:
    """Change the sign wherever this rank has it: whole, or as a ZeRO-3 partition, or, while it is gathered, both."""
    if weight.data.numel():
        weight.data.neg_()
    if hasattr(weight, "ds_tensor"):
        weight.ds_tensor.data.neg_()
