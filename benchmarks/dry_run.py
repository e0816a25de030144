"""What one rank of 64 or 512 holds: the real classes on fake tensors and torch's fake process group, without a GPU.

    python benchmarks/dry_run.py [--model 8B] [--ranks 64] [--base replicated|fsdp2] [--rank 0]

The base model is a Llama configuration of public sizes, built without memory and, for fsdp2, cut by our `shard_model`.
The GRADIEND part is that of a run: the space, this rank's part of it, `ParamMappedGradiendModel`, `SlicedEngine` with
its moments, x and y. Executed, on fake tensors: the gradients of all base weights handed over in the order of a
backward pass (replicated: through `Buckets` and `Reduced`, with their collectives), and one optimizer step. Every
tensor that any operation makes is watched: the peak of live bytes is printed, and none may be as large as the space.

What this cannot show: the base's own forward and backward pass (activations, the layers that FSDP gathers), what NCCL
and the CUDA allocator add, and any time. Chunks of a step are those of a CPU (2^18 entries; a GPU takes 2^26).
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.fsdp import shard_model, shard_of
from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.gradients.base import AddToVectors
from gradiend_dist.gradients.buckets import Buckets, Reduced
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.space import ParameterSpace, Slices

_COMMON = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "8B": {
        **_COMMON, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32
    },
    "70B": {
        **_COMMON, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64
    },
    "small": {
        **_COMMON, "hidden_size": 1024, "intermediate_size": 2815, "num_hidden_layers": 12, "num_attention_heads": 8,
        "vocab_size": 8191,
    },
}  # fmt: skip
RUNS = (("8B", 64, "replicated"), ("8B", 64, "fsdp2"), ("70B", 512, "replicated"), ("70B", 512, "fsdp2"))
KINDS = ("alternative", "diff")


class DryComm(Comm):
    """The other ranks say what this one says."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.world_size


class Watch(TorchDispatchMode):
    """Live bytes of all storages made while it is on, their peak, the largest tensor, and the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.collectives: list[str] = []
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        if "c10d" in str(function):
            self.collectives.append(function.__name__.split(".")[0])
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._take(leaf)
        return found

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self.largest = max(self.largest, size // max(1, tensor.element_size()))
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


@dataclass(frozen=True)
class Found:
    """Of one rank."""

    n: int
    part: int
    num_base: int
    """Base weights that this rank holds."""
    resident: int
    """Bytes of encoder, decoder, moments, x and y."""
    peak: int
    """The most live bytes at any time, the base's weights not counted."""
    largest: int
    """Entries of the largest tensor that was ever made."""
    largest_weight: int
    """The most that may be: the largest base weight, or a bucket."""
    collectives: dict[str, int]
    last_position: int
    """Of this rank, in the whole vector."""


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def plain_init() -> Iterator[None]:
    """Layers made on their device at once: torch's `skip_init` exchanges tensors, which fake ones cannot."""
    with mock.patch.object(nn.utils, "skip_init", lambda kind, *sizes, **options: kind(*sizes, **options)):
        yield


def dry_run(model: str, world_size: int, base: str, rank: int = 0) -> Found:
    config = LlamaConfig(**MODELS[model])
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config).to(torch.bfloat16)
    space = ParameterSpace.of_model(skeleton)
    with fake_group(rank, world_size):
        comm = DryComm(rank=rank, world_size=world_size)
        if base == "fsdp2":
            shard(skeleton, space)
            part = space.slices_of_shards({name: shard_of(p) for name, p in skeleton.named_parameters()})
            parts = [part]
        else:
            parts = [Slices.even(space.size, other, world_size) for other in range(world_size)]
            part = parts[rank]
        with FakeTensorMode(allow_non_fake_inputs=True), plain_init(), Watch() as watch:
            resident = work(space, parts, part, comm, watch, has_shards=base == "fsdp2")
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in skeleton.parameters())
    buckets = 0 if base == "fsdp2" else max(bucket.size for bucket in Buckets(space, [part], DryComm()).buckets)
    positions = part.positions(torch.tensor([part.size - 1]))
    assert positions.dtype == torch.int64, "positions are 64-bit"
    return Found(
        n=space.size,
        part=part.size,
        num_base=held,
        resident=resident,
        peak=watch.peak,
        largest=watch.largest,
        largest_weight=max(buckets, max(weight.numel for weight in space.weights)),
        collectives={name: watch.collectives.count(name) for name in dict.fromkeys(watch.collectives)},
        last_position=int(positions),
    )


def shard(skeleton: nn.Module, space: ParameterSpace) -> None:
    """As an FSDP run without special settings would."""
    plugin = SimpleNamespace(
        reshard_after_forward=True,
        mixed_precision_policy=None,
        cpu_offload=None,
        transformer_cls_names_to_wrap=None,
        cpu_ram_efficient_loading=False,
    )
    shard_model(skeleton, plugin, torch.device("cpu"), {weight.name for weight in space.weights})


def work(
    space: ParameterSpace, parts: list[Slices], part: Slices, comm: Comm, watch: Watch, *, has_shards: bool
) -> int:
    """Gradients of one item, then an optimizer step; returns the live bytes between them."""
    model = ParamMappedGradiendModel(space, slices=part, initialize=False)
    options = StepOptions("adamw", 1e-2, (0.9, 0.999), 1e-8, max_grad_norm=1.0, supervised=None)
    engine = SlicedEngine(model, options, comm)
    engine.state()  # moments are made when they are first wanted
    vectors = {kind: torch.empty(part.size) for kind in KINDS}
    resident = watch.live
    if not has_shards:  # with shards, FSDP leaves each rank its own, written straight into the vectors
        hand_over(space, Buckets(space, parts, comm), vectors)
    source, target = (vectors[kind].unsqueeze(0) for kind in KINDS)
    found = engine.step([GradiendBatch(source, target, torch.ones(1, 1))], 1e-5)
    assert found.shape == (4,)
    return resident


def hand_over(space: ParameterSpace, buckets: Buckets, vectors: dict[str, Tensor]) -> None:
    """What the hooks of a backward pass do, for each kind of gradient."""
    reduced = Reduced(buckets, AddToVectors([vectors]), torch.device("cpu"))
    for kind in KINDS:
        reduced.begin([(kind, 1.0)])
        for weight in reversed(space.active()):
            gradient = torch.empty(weight.shape, dtype=torch.bfloat16)
            entries = gradient.reshape(-1).float()
            for place, _, factor in reduced.ranges(weight):
                torch.mul(entries, factor, out=place)
            reduced.done(weight)
        reduced.end()


def check(found: Found, world_size: int) -> None:
    """No rank holds anything of size n; what it holds for good is its share."""
    assert found.largest <= found.largest_weight, f"a tensor of {found.largest:,} entries, n is {found.n:,}"
    assert found.largest < found.n / 4, f"a tensor of {found.largest:,} entries, n is {found.n:,}"
    expected = 44 * found.n / world_size
    assert abs(found.resident - expected) < 0.01 * expected + 1000, f"{found.resident:,} bytes, expected {expected:,}"


def describe(model: str, world_size: int, base: str, found: Found) -> str:
    gib = 2**30
    return (
        f"{model} on {world_size} ranks, {base} base: n = {found.n:,}; this rank owns {found.part:,} of it and "
        f"{found.num_base:,} base weights\n"
        f"  resident {found.resident / gib:.2f} GiB (weights, moments, x, y), peak {found.peak / gib:.2f} GiB, "
        f"base {2 * found.num_base / gib:.2f} GiB in bfloat16; largest tensor {found.largest:,} entries\n"
        f"  collectives of one item and step: {found.collectives}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--base", choices=["replicated", "fsdp2"])
    parser.add_argument("--rank", type=int, default=0, help="which of them this process is")
    options = parser.parse_args()
    for model, world_size, base in RUNS:
        if options.model not in (None, model) or options.base not in (None, base):
            continue
        world_size = options.ranks or world_size
        found = dry_run(model, world_size, base, options.rank)
        print(describe(model, world_size, base, found), flush=True)
        check(found, world_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
