"""Bytes that one optimizer step moves per entry of n, counted, next to the least possible; and how often it launches.

    python benchmarks/step_traffic.py [--n 32768] [--json FILE]

Both ways of a step on a GPU are run here on CPU tensors: torch's operations on all of n at once, as where chunks do not
stay in a cache, and the Triton kernels, in Triton's interpreter. Counted are

    operations   each operation that torch dispatches reads its tensors and writes its results once; views move nothing
    kernels      what the kernels load and store, lane by lane as far as the mask allows
    launches     dispatched operations that are not views, and launches of kernels

by the four passes over n and what is between them (K x m numbers). The least possible is what each pass must read and
write if it does so once: weights, moments, x and y. It says nothing about time, which depends on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from gradiend_dist.engines import chunks, fused
from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.model.gradiend import GradiendModel

PASSES = ("encode", "decoder sums", "encoder update", "decoder update", "between")
# K, m, dtype of the moments.
CASES = ((1, 1, "float32"), (1, 1, "bfloat16"), (4, 1, "float32"), (1, 3, "float32"))


@dataclass
class Count:
    """Bytes and launches by pass."""

    bytes: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    current: str = "between"

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def add(self, num_bytes: int, launches: int = 0) -> None:
        self.bytes[self.current] += num_bytes
        self.launches[self.current] += launches


class Operations(TorchDispatchMode):
    """Counts what torch dispatches, but for what the interpreter does to run a kernel."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count, self.inside_kernel = count, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        found = function(*args, **(kwargs or {}))
        if self.inside_kernel or moves_nothing(function):
            return found
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        written = tree_leaves(list(written_arguments(function, args, kwargs or {})))
        places = {value.data_ptr() for value in given}
        made = [value for value in tree_leaves(found) if isinstance(value, Tensor) and value.data_ptr() not in places]
        self.count.add(size_of(given) + size_of(written) + size_of(made), launches=1)
        return found


def moves_nothing(function: Any) -> bool:
    """A view, or memory that is not written yet."""
    returns = function._schema.returns
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return is_view or "empty" in function._schema.name


def written_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(function._schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and argument.name != "grads":  # which fused Adam writes only to take back a scaling
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def size_of(tensors: list[Tensor]) -> int:
    """Bytes, of a tensor that is given twice and of a number that is spread over many only once."""
    distinct = {(t.data_ptr(), tuple(t.shape)): t for t in tensors if isinstance(t, Tensor)}
    return sum(
        t.element_size() * torch.Size(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride).numel()
        for t in distinct.values()
        if t.numel()
    )


@contextmanager
def counted() -> Iterator[Count]:
    """Counts all that is done inside."""
    count = Count()
    operations = Operations(count)
    load, store, run = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        InterpretedFunction.run,
    )

    def counted_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        count.add(int(mask.data.sum()) * bytes_behind(pointers))
        return load(self, pointers, mask, *more)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        count.add(int(mask.data.sum()) * bytes_behind(pointers))
        return store(self, pointers, value, mask, *more)

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.add(0, launches=1)
        operations.inside_kernel = True
        run(self, *args, **kwargs)
        operations.inside_kernel = False

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
        mock.patch.object(InterpretedFunction, "run", counted_run),
        operations,
    ):
        yield count


def bytes_behind(pointers: Any) -> int:
    return pointers.get_element_ty().primitive_bitwidth // 8


def traffic(n: int, items: int, latents: int, moments_dtype: str, *, kernels: bool) -> Count:
    """One step, after one that makes what is made once."""
    options = StepOptions(
        optim="adamw", weight_decay=0.01, betas=(0.9, 0.999), epsilon=1e-8, max_grad_norm=0.0, supervised=None,
        moments_dtype=moments_dtype,
    )  # fmt: skip
    with (
        mock.patch.object(fused, "uses_kernels", lambda _weight, _options: kernels),
        mock.patch.object(chunks, "CHUNK", n),
    ):
        engine = SlicedEngine(GradiendModel(n, latents), options)
        batch = GradiendBatch(torch.randn(items, n), torch.randn(items, n), torch.ones(items, 1))
        engine.step([batch], 1e-3)
        with counted() as count:
            for half, method, name in (
                (engine.encoder, "products", "encode"),
                (engine.encoder, "gradient_square", "encode"),
                (engine.decoder, "sums", "decoder sums"),
                (engine.encoder, "update", "encoder update"),
                (engine.decoder, "update", "decoder update"),
            ):
                setattr(half, method, within(count, name, getattr(half, method)))
            engine.step([batch], 1e-3)
    return count


def within(count: Count, name: str, work: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def counted_work(*args: Any) -> Tensor:
        with count.during(name):
            return work(*args)

    return counted_work


def least(items: int, latents: int, moments_dtype: str) -> dict[str, int]:
    """Bytes per entry, of a model with a decoder bias."""
    moment = 2 if moments_dtype == "bfloat16" else 4
    weight = 2 * (4 + 2 * moment)  # and its two moments, read and written
    x = y = 4 * items
    return {
        # Of several items the norm of the encoder's gradient needs dloss/da, and so x a second time.
        "encode": 4 * latents + x * (1 if items == 1 else 2),
        "decoder sums": 4 * (latents + 1) + y,
        "encoder update": weight * latents + x,
        "decoder update": weight * (latents + 1) + y,
        "between": 0,
    }


def row_of(n: int, items: int, latents: int, moments_dtype: str, name: str, count: Count) -> dict[str, Any]:
    by_pass = {one: count.bytes[one] / n for one in PASSES}
    return {
        "K": items, "m": latents, "moments": moments_dtype, "step": name,
        **{one: round(value, 2) for one, value in by_pass.items()},
        "bytes": round(sum(by_pass.values()), 2),
        "launches": sum(count.launches.values()),
        "launches over n": sum(count.launches[one] for one in PASSES[:-1]),
    }  # fmt: skip


def rows(n: int) -> Iterator[dict[str, Any]]:
    for items, latents, moments_dtype in CASES:
        for name, kernels in (("operations", False), ("kernels", True)):
            count = traffic(n, items, latents, moments_dtype, kernels=kernels)
            yield row_of(n, items, latents, moments_dtype, name, count)
        must = {one: n * value for one, value in least(items, latents, moments_dtype).items()}
        yield row_of(n, items, latents, moments_dtype, "least", Count(Counter(must)))


def as_table(found: list[dict[str, Any]]) -> str:
    def line(cells: Any) -> str:
        return "  ".join(f"{cell:>{max(9, len(name))}}" for name, cell in zip(found[0], cells, strict=True))

    return "\n".join([line(found[0]), *(line(row.values()) for row in found)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2**15, help="entries; kernels run in an interpreter")
    parser.add_argument("--json", type=Path, help="write the rows into this file")
    options = parser.parse_args()
    found = list(rows(options.n))
    print(as_table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
