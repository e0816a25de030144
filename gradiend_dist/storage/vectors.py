"""Where vectors with an entry for each base weight are: with the base model, on the host, or in files that are mapped.

A mapped file is memory that the kernel may write out and read again: of a vector in one, as much is in memory as there
is room for. The file has no name, and is gone with its tensor.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradiend_dist.distributed.devices import free_bytes
from gradiend_dist.storage.files import explained

HOST = torch.device("cpu")

# Of what is free: the rest is left to the base model's passes, and on a host to others.
SHARE_OF_FREE = 0.5


def mapped(size: int, dtype: torch.dtype, directory: Path) -> Tensor:
    """Zeros in a file of their own. Its space on the disk is taken now: a full disk would end the process later."""
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".vector_", dir=directory)
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size * dtype.itemsize)
                return torch.from_file(name, shared=True, size=size, dtype=dtype)
            return torch.zeros(0, dtype=dtype)
        finally:
            os.close(descriptor)
            os.unlink(name)


@dataclass(frozen=True)
class VectorPlace:
    """Where a process keeps vectors of size n that belong to no step of training. No communication."""

    device: torch.device
    """The base model's."""
    directory: Path | None = None
    """Where mapped files are; None: nothing is offloaded."""

    def zeros(self, size: int) -> Tensor:
        """Of float32."""
        return self._made(torch.zeros, size, torch.float32)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return self._made(torch.empty, size, dtype)

    def _made(self, make: Callable[..., Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """With the base model where that leaves enough to it, else on the host; offloaded, on the host of a GPU, or,
        where that has no room either, in a file."""
        num_bytes, on_gpu = size * dtype.itemsize, self.device.type == "cuda"
        if self.directory is None:
            fits = not on_gpu or num_bytes <= SHARE_OF_FREE * free_bytes(self.device)
            return make(size, dtype=dtype, device=self.device if fits else HOST)
        if on_gpu and num_bytes <= SHARE_OF_FREE * free_bytes(HOST):
            return make(size, dtype=dtype)
        return mapped(size, dtype, self.directory)  # a new file is zero, and need not be written
