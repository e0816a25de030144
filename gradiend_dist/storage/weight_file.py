"""model.safetensors, written and read by all ranks at once, each its own byte ranges: nobody gathers 3n numbers.

Rank 0 lays the file out (the format is an 8-byte length, a JSON header, and the tensors one behind the other), then
everyone writes what it owns. On a file system that the ranks do not share, they hand their pieces to rank 0 instead.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.storage.visibility import everyone_sees, is_shared

DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip

ENCODER_BIAS = "encoder.0.linear.bias"

# Bytes that are brought to the host, written or sent at once.
TOGETHER = 2**26


@dataclass(frozen=True)
class Piece:
    """A run of numbers of one tensor that lie one behind the other in the file and in memory."""

    name: str
    start: int
    """In numbers from the start of the whole tensor."""
    values: Tensor


def shapes(model: GradiendModel) -> dict[str, tuple[int, ...]]:
    """The tensors of the whole model, in the order of the file."""
    n, m = model.input_dim, model.latent_dim
    found: dict[str, tuple[int, ...]] = {"encoder.0.linear.weight": (m, n), "encoder.0.linear.bias": (m,)}
    found["decoder.0.linear.weight"] = (n, m)
    if model.bias_decoder:
        found["decoder.0.linear.bias"] = (n,)
    return found


def pieces(model: GradiendModel) -> Iterator[Piece]:
    """What this rank owns of the file, as views of its tensors; the encoder's bias is the same on every rank."""
    n, m = model.input_dim, model.latent_dim
    for own, there in model.slices.range_pairs():
        for row in range(m):
            yield Piece("encoder.0.linear.weight", row * n + there.start, model.encoder_weight[row, own])
        yield Piece("decoder.0.linear.weight", there.start * m, model.decoder_weight[own].reshape(-1))
        if model.decoder_bias_vector is not None:
            yield Piece("decoder.0.linear.bias", there.start, model.decoder_bias_vector[own])
    if model.slices.is_whole or (model.slices.ranges and model.slices.ranges[0][0] == 0):
        yield Piece("encoder.0.linear.bias", 0, model.encoder_bias)


def write_weights(model: GradiendModel, path: Path, comm: Comm) -> None:
    """Write the file at `path`, whose directory exists for rank 0; complete on return. All ranks call this."""
    offsets = comm.first(f"laying out {path.name}", lambda: _lay_out(model, path))
    if is_shared(path.parent, comm):
        write_pieces(path, pieces(model), offsets)
        comm.meet(f"writing {path.name}")
        return
    mine = list(pieces(model))
    for source, table in enumerate(comm.gather([(piece.name, piece.start, piece.values.numel()) for piece in mine])):
        if comm.rank == source != 0:
            for piece in mine:
                for _, block in _blocks(piece.values):
                    comm.send(block, 0)
        elif comm.is_first:
            write_pieces(
                path, iter(mine) if source == 0 else _received(table, comm, source, model.torch_dtype), offsets
            )
    comm.meet(f"writing {path.name}")


def _received(table: list[tuple[str, int, int]], comm: Comm, source: int, dtype: torch.dtype) -> Iterator[Piece]:
    """What rank `source` sends, in blocks, in the order of its table."""
    for name, start, size in table:
        for offset in range(0, size, TOGETHER // dtype.itemsize):
            block = torch.empty(min(TOGETHER // dtype.itemsize, size - offset), dtype=dtype)
            yield Piece(name, start + offset, comm.receive(block, source))


def _lay_out(model: GradiendModel, path: Path) -> dict[str, int]:
    return lay_out(path, {name: (model.torch_dtype, shape) for name, shape in shapes(model).items()})


def lay_out(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, int]:
    """Write the header and size the file; returns where each tensor starts."""
    header: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in header.items()}  # type: ignore[index]


def write_pieces(path: Path, mine: Iterable[Piece], offsets: Mapping[str, int]) -> None:
    """Into a file that was laid out; numbers of the dtype that it was laid out for."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for piece in mine:
            for start, block in _blocks(piece.values):
                require_finite(block, piece.name)
                _write_at(descriptor, block, offsets[piece.name] + (piece.start + start) * block.itemsize)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_finite(block: Tensor, name: str) -> None:
    """A number that is none is never written as a result."""
    if not bool(block.isfinite().all()):
        raise UserError(f"{name} has numbers that are not finite, so no model is written: lower learning_rate.")


def _blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    size = TOGETHER // values.itemsize
    for start in range(0, values.numel(), size):
        yield start, values[start : start + size].cpu().contiguous()


def _write_at(descriptor: int, block: Tensor, offset: int) -> None:
    data = memoryview(block.view(torch.uint8).numpy().data)
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_weights(model: GradiendModel, path: Path, comm: Comm) -> None:
    """Fill the model, or this rank's slices of one, from a file of its whole; tensors are read by ranges.

    All ranks call this. Ranks that do not see the file get their ranges from rank 0.
    """
    mine = list(pieces(model))
    if everyone_sees(path, comm):
        with safe_open(str(path), framework="pt") as file:
            assert {*file.keys(), ENCODER_BIAS} == {*shapes(model)}, f"{path} holds another model"
            for piece in [piece for piece in mine if piece.name != ENCODER_BIAS]:
                piece.values.copy_(_read(file, piece.name, piece.start, piece.values.numel()))
            model.encoder_bias.copy_(_read(file, ENCODER_BIAS, 0, model.latent_dim))
        return
    tables = comm.gather([(piece.name, piece.start, piece.values.numel()) for piece in mine])
    bias = (ENCODER_BIAS, 0, model.latent_dim)
    if not comm.is_first:
        for values in [*(piece.values for piece in mine), model.encoder_bias]:
            values.copy_(comm.receive(torch.empty(values.numel(), dtype=values.dtype), 0))
        return
    with safe_open(str(path), framework="pt") as file:
        for target, table in enumerate(tables):
            for number, (name, start, size) in enumerate([*table, bias]):
                found = _read(file, name, start, size)
                if target:
                    comm.send(found, target)
                else:
                    [*(piece.values for piece in mine), model.encoder_bias][number].copy_(found)


def _read(file: Any, name: str, start: int, size: int) -> Tensor:
    """`size` numbers of a tensor from its `start`-th on: a range of one row, or whole rows of a narrow one."""
    if name == ENCODER_BIAS and name not in file.keys():  # noqa: SIM118  it is no mapping
        return torch.zeros(size)  # models of the reference's next version may have none
    tensor = file.get_slice(name)
    shape = tensor.get_shape()
    if len(shape) == 1:
        return tensor[start : start + size]
    if name.startswith("encoder"):
        row, first = divmod(start, shape[1])
        return tensor[row : row + 1, first : first + size].reshape(-1)
    width = shape[1]
    return tensor[start // width : (start + size) // width].reshape(-1)
