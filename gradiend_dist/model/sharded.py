"""Loading a base model in shards: made without memory, cut, and then each rank reads its own rows from the files.

transformers' own loader does the reading: it knows names that differ between files and model, experts that are stored
one by one, tied weights, buffers that no file has, and asks a weight that is cut which of its rows are wanted. What it
lacks is a way to cut otherwise than by its own plans; there is a method for these, between the making of a model and
its loading, and a subclass has another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)

Cut = Callable[[nn.Module], nn.Module]

NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"


def load_in_shards(skeleton: nn.Module, path: str, config: Any, cut: Cut, **options: Any) -> tuple[nn.Module, Any]:
    """The model of which `skeleton` has the architecture, each rank's rows on the device that `options` name.

    All ranks call this. Not for a model of which `reads_by_rows` is false.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    sharded: Any = _cut_before_loading(type(skeleton), cut)
    with reading_without_threads():
        model, report = sharded.from_pretrained(path, config=config, distributed_config=DistributedConfig(), **options)
    model.load_state_dict({}, strict=False)  # so FSDP takes note of weights that were read after it had cut them
    vars(model.config).pop("distributed_config", None)  # no fact about the model
    return model, report


@contextlib.contextmanager
def reading_without_threads() -> Iterator[None]:
    """transformers reads weights ahead in threads, and what these have freed a process does not use again: on a host
    where rows do not divide over the ranks, half as much again as a rank's shard."""
    before = os.environ.get(NO_THREADS)
    os.environ[NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_THREADS]
        else:
            os.environ[NO_THREADS] = before


def _cut_before_loading(model_class: type, cut: Cut) -> type:
    """The same class, but for what it does between the making of a model and its loading. All ranks make it."""

    def maybe_distribute_model(_class: type, model: nn.Module, *_plans: Any) -> nn.Module:
        model.tie_weights()  # type: ignore[operator]  # FSDP gathers a weight once that two modules share
        return cut(model)

    def initialize_weights(model: Any) -> None:
        """Buffers alone: drawing a weight is a collective, and not all ranks see that theirs does not fit."""
        for parameter in model.parameters():
            parameter._is_hf_initialized = True
        model_class.initialize_weights(model)  # type: ignore[attr-defined]

    own = {
        "__module__": model_class.__module__,
        "maybe_distribute_model": classmethod(maybe_distribute_model),
        "initialize_weights": initialize_weights,
    }
    return type(model_class.__name__, (model_class,), own)  # the name is a key to what transformers knows about it


def reads_by_rows(skeleton: Any) -> bool:
    """Is a rank's shard of each weight made of rows of what the files hold? Not where they are to be rearranged first.

    What may come first is the stacking of experts, of which each rank then takes some.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = [item for item in get_model_conversion_mapping(skeleton) if isinstance(item, WeightConverter)]
    stacked = [parameter.shape[0] for parameter in skeleton.parameters() if parameter.dim() > 2]
    if not conversions or (all(map(_stacks_experts, conversions)) and min(stacked, default=0) >= dist.get_world_size()):
        return True
    logger.info("%s is stored in another form than it is used in: every rank reads all of it", type(skeleton).__name__)
    return False


def _stacks_experts(conversion: Any) -> bool:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = conversion.operations
    is_stacked = isinstance(first, MergeModulelist) and first.dim == 0
    return is_stacked and all(isinstance(other, Concatenate) and other.dim != 0 for other in others)
