"""Tensors of training states, through torch.distributed.checkpoint: saved by any number of ranks, read by any other.

Tensors of size n are saved as ranges of the whole vector. Reading a state runs no code: what torch would unpickle is
checked name by name before.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import Engine
from gradiend_dist.errors import UserError, first_line
from gradiend_dist.space import Slices

TENSORS = "tensors"

# What a pickle of notes or an archive raises that was damaged, or made to do harm.
UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, OSError, EOFError, AttributeError, KeyError, IndexError, TypeError),
    *(ValueError, MemoryError, OverflowError, ImportError, NotImplementedError, RuntimeError),
)


class CutTensor(torch.Tensor):
    """This rank's slices of a vector (or of a matrix's rows), as torch.distributed.checkpoint reads it."""

    slices: Slices

    @staticmethod
    def of(own: Tensor, slices: Slices) -> CutTensor:
        cut = own.detach().as_subclass(CutTensor)
        cut.slices = slices
        return cut

    def plain(self) -> Tensor:
        return self.as_subclass(torch.Tensor)

    def size(self, *dimensions: int) -> Any:  # type: ignore[override]
        """Of the whole."""
        whole = torch.Size([self.slices.total, *self.plain().shape[1:]])
        return whole[dimensions[0]] if dimensions else whole

    def _chunks(self) -> list[tuple[slice, ChunkStorageMetadata]]:
        shape = self.plain().shape[1:]
        return [
            (
                own,
                ChunkStorageMetadata(
                    offsets=torch.Size([there.start, *(0 for _ in shape)]),
                    sizes=torch.Size([there.stop - there.start, *shape]),
                ),
            )
            for own, there in self.slices.range_pairs()
            if there.start < there.stop
        ]

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for _, chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for _, chunk in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for own, chunk in self._chunks():
            if chunk.offsets == index.offset:
                return self.plain()[own]
        raise AssertionError(f"{index} is not of this rank")


class SafeUnpickler(pickle.Unpickler):
    """Reads what torch.distributed.checkpoint notes about its tensors, and nothing that could run code."""

    # Exactly these: a module's other names reach as far as its imports. Without the class for bytes, which torch would
    # unpickle in their turn.
    NAMES = {
        "torch.distributed.checkpoint.metadata": (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "_MEM_FORMAT_ENCODING"),
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "collections": ("OrderedDict",),
        "pathlib": ("PosixPath", "PurePosixPath", "Path"),
        "torch": ("Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self.NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a training state")


class SafeReader(FileSystemReader):
    """torch's reader loads tensors with weights_only; its own notes it would unpickle as they are."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            SafeUnpickler(stream).load()  # raises for what must not be there; then the reader's own way is safe
        return super().read_metadata(*args, **kwargs)


class AlreadyStaged(AsyncStager):
    """Tensors were copied to the host before: nothing is left to stage."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


def start_saving(engines: Mapping[int, Engine], directory: Path, comm: Comm, group: Any) -> Future[Any] | None:
    """Copy the engines' states to the host and begin to write them, in a thread; None: everything is written.

    All ranks call this. `group` carries the thread's messages, apart from those of the training.
    """
    tensors: dict[str, Tensor] = {}
    for seed, engine in engines.items():
        own = _tensors_of(seed, engine, lambda tensor: tensor.detach().to("cpu", copy=True))
        if own is None:
            engine.save_own(directory / f"seed_{seed}")
        else:
            tensors.update(own)
    if not tensors:
        return None
    if comm.is_alone:
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is what we ask for
    future = async_save(
        tensors,
        # Nothing is copied ahead: torch would do so on the thread's current device, which is GPU 0 on every rank.
        storage_writer=FileSystemWriter(directory / TENSORS, single_file_per_rank=True, per_thread_copy_ahead=0),
        async_stager=AlreadyStaged(),
        process_group=group,
        no_dist=comm.is_alone,
    )
    assert isinstance(future, Future), "the tensors were staged already"
    return future


def wait_for(future: Future[Any]) -> None:
    """Until this rank has written its own. What a file system refuses is raised as an OSError, all else as it is."""
    try:
        future.result()
    except CheckpointException as error:
        # One rank's failure, told on all of them: the first is as good as any.
        cause = next(iter(error.failures.values()))[0]
        if STREAM_WRITER in str(cause):  # torch tells a full disk by a RuntimeError
            raise OSError(str(cause)) from error
        raise cause from error


# What writes torch's archives, as its messages name it.
STREAM_WRITER = "PytorchStreamWriter"


class FilePart(io.RawIOBase):
    """Some bytes of a file, as a file to read."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._length}[whence] + offset
        if self._place < 0:
            raise OSError("before the start")
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._place += len(data)
        return len(data)


def fault_of_tensors(directory: Path, comm: Comm) -> str | None:
    """What is wrong with the files that hold tensors; None: nothing that this rank has looked at, which is its share.

    Each tensor lies in an archive of its own, with a checksum that torch writes and does not read. No communication.
    """
    path = directory / TENSORS
    if not path.is_dir():
        return _fault_of_archives(directory, comm)  # an engine with a format of its own
    try:
        with (path / ".metadata").open("rb") as file:
            metadata = SafeUnpickler(file).load()
        for info in sorted(metadata.storage_data.values(), key=str)[comm.rank :: comm.world_size]:
            with (path / info.relative_path).open("rb") as file:
                if zipfile.ZipFile(FilePart(file, info.offset, info.length)).testzip() is not None:
                    return f"{TENSORS}/{info.relative_path} is not as it was written"
    except UNREADABLE as error:
        return f"{TENSORS} cannot be read ({first_line(error)})"
    return None


def _fault_of_archives(directory: Path, comm: Comm) -> str | None:
    """The same of DeepSpeed's files, which are archives of torch's. No communication."""
    for path in sorted(directory.rglob("*.pt"))[comm.rank :: comm.world_size]:
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    return f"{path.relative_to(directory)} is not as it was written"
        except UNREADABLE as error:
            return f"{path.relative_to(directory)} cannot be read ({first_line(error)})"
    return None


def load_engines(engines: Mapping[int, Engine], directory: Path, comm: Comm) -> None:
    """Into the engines' tensors in place, from whatever ranges they were saved as. All ranks call this."""
    tensors: dict[str, Any] = {}
    for seed, engine in engines.items():
        own = _tensors_of(seed, engine, lambda tensor: tensor)
        if own is None:
            engine.load_own(directory / f"seed_{seed}")
        else:
            tensors.update(own)
    if not tensors:
        return
    path = directory / TENSORS
    try:
        load(tensors, storage_reader=SafeReader(path), process_group=comm.control, no_dist=comm.is_alone)
    except (CheckpointException, pickle.UnpicklingError) as error:
        raise UserError(f"The state {path} is damaged: pass --resume false to start anew.") from error


def _tensors_of(seed: int, engine: Engine, prepare: Callable[[Tensor], Tensor]) -> dict[str, Tensor] | None:
    """By the names of the file; None where the engine has a format of its own."""
    state = engine.state()
    if state is None:
        return None
    tensors = {f"{seed}.{name}": prepare(tensor) for name, tensor in state.cut.items()}
    if not engine.slices.is_whole:
        tensors = {name: CutTensor.of(tensor, engine.slices) for name, tensor in tensors.items()}
    return {**tensors, **{f"{seed}.{name}": prepare(tensor) for name, tensor in state.same.items()}}
