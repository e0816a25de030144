"""Pretend GPUs: tensors with real values and real gradients on devices that obey CUDA's and NCCL's rules.

    with pretend_gpus(2):                        # `gpu:1` and `gpu:2` exist, and a single process is placed on them
        trainer.train()
    with pretend_gpus(1), waits() as counted:    # each place at which the host waited for the device, and how often
        engine.step(batches, 1e-3)
    with pretend_ranks():                        # this rank's GPU, of the processes that torchrun has started
        trainer.train()

A device of torch's slot for private ones; each tensor on it wraps one of the host. What a GPU would refuse fails here:
tensors of several devices in one operation (of the host those without dimensions alone), a generator of the host.
Where a GPU makes the host wait, the line that asked is counted: numbers that are read, sizes that depend on values,
copies from or to the host that are not `non_blocking`, `torch.tensor(numbers, device=...)`.

`nccl_rules` makes gloo's default group as strict as NCCL: tensors of the device alone, contiguous, without truth
values; and groups of the host take tensors of the host alone.

Not shown: streams and events, anything under `device.type == "cuda"`, memory, FSDP2, DeepSpeed.

torch's autograd knows one device of this kind, `gpu:0`. All tensors are on it as torch sees them, and say that they are
on another one, which is why numbers start at 1; gradients do not pass from one pretend device to another. What autograd
makes by itself says `gpu:0`, and goes with any.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from gradiend_dist import session
from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.distributed import launch as launches
from gradiend_dist.distributed.devices import Placement, place
from gradiend_dist.engines import spread

NAME = "gpu"

# Torch has one slot for a device of this kind, and autograd starts its threads at the first backward pass: it must come
# before that.
_setup_privateuseone_for_python_backend(NAME)
# Once it is there, activation checkpointing asks which dtypes it has under autocast.
vars(torch)[NAME].get_amp_supported_dtype = lambda: [torch.bfloat16]


# Operations whose result the host reads, or whose size depends on values.
READ = {"_local_scalar_dense", "is_nonzero", "equal", "item"}
SIZED_BY_VALUES = {"nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select"}
# Take indices of the host as well: they are copied, which is a wait.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPYING = {"_to_copy", "copy_", "_copy_from"}

# Lines of these are told as the place of a wait.
PLACES = ("/gradiend_dist/", "/transformers/")


class Refused(AssertionError):
    """A GPU, or NCCL, would not do that."""


# --- waits


_counters: list[Counter[str]] = []


@contextlib.contextmanager
def waits() -> Iterator[Counter[str]]:
    """How often the host waited for the device meanwhile, by reason and place."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def count_wait(reason: str) -> None:
    if _counters:
        told = f"{place_in_code()}: {reason}"
        for counter in _counters:
            counter[told] += 1


def place_in_code() -> str:
    """The innermost line of the package, or of a base model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for mark in PLACES:
            if mark in name and "/tests/" not in name:
                return f"{mark[1:]}{name.rsplit(mark, 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


# --- the device


class OnGpu(torch.Tensor):
    """A tensor of a pretend GPU."""

    on_host: Tensor
    """Its values."""
    where: torch.device

    @staticmethod
    def __new__(cls, on_host: Tensor, index: int) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.on_host, made.where = on_host.detach(), torch.device(NAME, index)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where

    def to(self, *args: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """As torch's, which sees the device beneath: to where another tensor is; no copy where nothing changes."""
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in options.items() if k != "copy"})
        if device in (None, self.where) and dtype in (None, self.dtype) and not options.get("copy"):
            return self
        return super().to(*args, **options)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG003
        return run(function, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.on_host}, device={self.device})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise Refused("numpy() of a tensor on a GPU: call cpu() first")


@dataclass(frozen=True)
class Operation:
    """What the rules need to know of one, found out once: they are asked at every call."""

    name: str
    is_mutable: bool
    copies: bool
    indexes: bool
    wait: str | None
    """Why the host waits whenever it is called."""

    @staticmethod
    @functools.cache
    def of(function: Any) -> Operation:
        schema = function._schema
        name = schema.name.split("::")[1]
        wait = "a number is read" if name in READ else None
        if name in SIZED_BY_VALUES:
            wait = f"the size of {name} depends on values"
        return Operation(name, schema.is_mutable, name in COPYING, name in INDEXING, wait)


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """One operation, by the rules; its result is where its arguments are, or where it was asked for."""
    operation = Operation.of(function)
    tensors: list[Tensor] = []
    bare_args = [to_host(leaf, tensors) for leaf in args]
    bare_kwargs = {name: to_host(leaf, tensors) for name, leaf in kwargs.items()}
    wanted = kwargs.get("device")
    check(operation, args, tensors)
    count_waits(operation, args, kwargs, tensors)
    for option in ("non_blocking", "pin_memory"):
        if option in bare_kwargs and operation.name != "copy_":
            del bare_kwargs[option]
    found = function(*bare_args, **bare_kwargs)
    index = max((tensor.where.index for tensor in tensors if type(tensor) is OnGpu), default=None)
    if wanted is not None:
        index = wanted.index or 0 if wanted.type == NAME else None
    if index is None:
        return found
    written = {id(t.on_host): t for t in tensors if type(t) is OnGpu} if operation.is_mutable else {}
    return to_gpu(found, index, written)


def to_host(leaf: Any, tensors: list[Tensor]) -> Any:
    """What an operation of the host takes instead; the tensors that were met are added to the list."""
    if isinstance(leaf, Tensor):
        tensors.append(leaf)
        return leaf.on_host if type(leaf) is OnGpu else leaf
    if isinstance(leaf, list | tuple):
        return [to_host(inner, tensors) for inner in leaf]
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if isinstance(leaf, torch.Generator):
        raise Refused(f"a generator of the host on a GPU at {place_in_code()}")
    return leaf


def to_gpu(found: Any, index: int, written: dict[int, OnGpu]) -> Any:
    """The result on the device; a tensor that was written to is the one that was given."""
    if isinstance(found, Tensor):
        if id(found) in written:
            return written[id(found)]
        if found._is_zerotensor():  # has no memory, which kernels need; forward mode makes such
            found = torch.zeros(found.shape, dtype=found.dtype)
        return OnGpu(found, index)
    if isinstance(found, list | tuple):
        return type(found)(to_gpu(inner, index, written) for inner in found)
    return found


def check(operation: Operation, args: Any, tensors: list[Tensor]) -> None:
    """All tensors on one device; of the host those without dimensions, what is copied, and indices."""
    if operation.copies:
        return
    first = args[0] if args else None
    on_gpu = [tensor for tensor in tensors if type(tensor) is OnGpu]
    if on_gpu and operation.is_mutable and isinstance(first, Tensor) and type(first) is not OnGpu:
        raise Refused(f"{operation.name} of a tensor on cpu by one on {on_gpu[0].device} at {place_in_code()}")
    devices = {tensor.device for tensor in tensors if tensor.dim() or type(tensor) is OnGpu}
    if operation.indexes and type(first) is OnGpu:
        devices.discard(torch.device("cpu"))
    devices = {device for device in devices if (device.type, device.index) != (NAME, 0)}  # goes with any
    if len(devices) > 1:
        raise Refused(f"{operation.name} of tensors on {', '.join(sorted(map(str, devices)))} at {place_in_code()}")


def count_waits(operation: Operation, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    if not _counters or not tensors:
        return
    on_gpu = [type(tensor) is OnGpu for tensor in tensors]
    if operation.wait is not None and any(on_gpu):
        count_wait(operation.wait)
    elif operation.name == "repeat_interleave" and kwargs.get("output_size") is None and any(on_gpu):
        count_wait("the size of repeat_interleave depends on values")
    elif operation.indexes and on_gpu[0]:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype == torch.bool for index in indices):
            count_wait("a mask as index")
        if any(type(index) is not OnGpu for index in indices):
            count_wait("an index is copied to the device")
    elif operation.copies:
        wanted = kwargs.get("device")
        ends = set(on_gpu) if wanted is None else {*on_gpu, wanted.type == NAME}
        waits_for = not (kwargs.get("non_blocking") or (operation.name == "copy_" and len(args) > 2 and args[2]))
        if len(ends) == 2 and waits_for:
            to_device = on_gpu[0] if operation.name == "copy_" else not on_gpu[0]
            count_wait("a copy to the device" if to_device else "a copy from the device")


class Device(TorchDispatchMode):
    """Takes the operations that name a device and have no tensor on it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if (device is not None and device.type == NAME) or any(t is OnGpu for t in types):
            return run(function, args, kwargs)
        return function(*args, **kwargs)


def _from_numbers(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor`, which makes a tensor of the host and copies it, beneath what a mode sees."""
    made = _TENSOR(data, *args, **options)
    if device is None or torch.device(device).type != NAME:
        return made
    count_wait("numbers are copied to the device")
    return OnGpu(made, torch.device(device).index or 0)


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        return data.to(device=device or data.device, dtype=dtype or data.dtype)
    return _from_numbers(data, dtype=dtype, device=device) if dtype else _from_numbers(data, device=device)


_TENSOR, _AS_TENSOR = torch.tensor, torch.as_tensor


@contextlib.contextmanager
def made_by(tensor: Any, as_tensor: Any) -> Iterator[None]:
    with mock.patch.object(torch, "tensor", tensor), mock.patch.object(torch, "as_tensor", as_tensor):
        yield


@contextlib.contextmanager
def pretend_gpus(count: int) -> Iterator[None]:
    """So many GPUs: `gpu:0`, `gpu:1` and so on, on which a single process is placed as on real ones."""
    load, swaps = session.load_base_model, torch.__future__.get_swap_module_params_on_conversion()

    def loaded(*args: Any, **options: Any) -> Any:
        with _disable_current_modes(), made_by(_TENSOR, _AS_TENSOR):  # as far as the host
            return load(*args, **{**options, "device": None})  # what files are read to, it has no memory for

    # Weights of two layers in one stay one when the model moves.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            made_by(_from_numbers, _as_tensor),
            mock.patch.object(session, "load_base_model", loaded),
            mock.patch.object(spread, "placement_of", lambda args: placement(args, count)),
            Device(),
        ):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def placement(args: TrainingArguments, count: int) -> Placement:
    """The documented one."""
    real = place(count, encoder_decoder_same_device=args.encoder_decoder_same_device)
    return replace(real, **{half: torch.device(NAME, device.index + 1) for half, device in vars(real).items()})


# --- ranks


@contextlib.contextmanager
def pretend_ranks(timeout: float) -> Iterator[Counter[str]]:
    """A GPU on each rank of this launch, and NCCL's rules between them; which collectives were used how often."""
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(nccl_rules())  # before the ranks join: their hosts then get a group of their own
        launch = launches.launched(timeout)
        device = torch.device(NAME, 1 + launch.comm.rank)
        on_gpu = replace(launch, accelerator=SimpleNamespace(device=device))
        stack.enter_context(mock.patch.object(launches, "_joined", [on_gpu]))
        stack.enter_context(pretend_gpus(launch.comm.world_size))
        yield used


COLLECTIVES = (
    "all_reduce", "reduce_scatter", "all_to_all_single", "broadcast", "all_gather", "all_gather_into_tensor",
    "reduce_scatter_tensor", "send", "recv",
)  # fmt: skip


@contextlib.contextmanager
def nccl_rules() -> Iterator[Counter[str]]:
    """The default group is of the devices and obeys NCCL's rules, others are of the hosts; how often each was used."""
    used: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, strict(getattr(dist, name), name, used)))
        stack.enter_context(mock.patch.object(dist, "get_backend", lambda group=None: "gloo" if group else "nccl"))
        yield used


def strict(real: Callable[..., Any], name: str, used: Counter[str]) -> Callable[..., Any]:
    def collective(*args: Any, **options: Any) -> Any:
        of_devices = options.get("group") is None
        used[f"{name} of {'devices' if of_devices else 'hosts'}"] += 1
        for tensor in tree_leaves((args, options)):
            if not isinstance(tensor, Tensor):
                continue
            if isinstance(tensor, OnGpu) != of_devices:
                raise Refused(f"{name}: a tensor on {tensor.device} at {place_in_code()}")
            if of_devices and tensor.dtype == torch.bool:
                raise Refused(f"{name} of truth values at {place_in_code()}")
            if not tensor.is_contiguous():
                raise Refused(f"{name} of a tensor that is not contiguous at {place_in_code()}")
        with _disable_current_modes():
            return real(*to_host(args, []), **{name: to_host(leaf, []) for name, leaf in options.items()})

    return collective
