"""Checks that need real ranks and no base model: pruning, weight files, engines, memory. Started by together_script.py.

Rank 0 writes RESULTS/<check>.json; files that a check leaves go to RESULTS as well.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines import chunks
from gradiend_dist.engines.base import Engine, GradiendBatch, StepOptions
from gradiend_dist.engines.sliced import SlicedEngine, encode_slices
from gradiend_dist.errors import UserError
from gradiend_dist.model import gradiend as model_module
from gradiend_dist.model.entries import select_entries_to_keep
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.space import ParameterSpace, Slices
from gradiend_dist.storage import weight_file
from gradiend_dist.storage.weight_file import read_weights, write_weights
from gradiend_dist.training import pruning as pruning_module
from gradiend_dist.training.pruning import kth_smallest, select_over_ranks, top_over_ranks

# Epsilon is above gradients that are nothing but rounding, see test_world_size.py.
OPTIONS = StepOptions("adamw", weight_decay=0.01, betas=(0.9, 0.999), epsilon=1e-4, max_grad_norm=0.0, supervised=None)
NUM_STEPS = 5


def cut(n: int, comm: Comm, *, interleaved: bool) -> Slices:
    """A rank's part: one range, or, as under FSDP, a piece of every weight of 5 entries."""
    if not interleaved:
        return Slices.even(n, comm.rank, comm.world_size)
    ranges = tuple((start, min(start + 5, n)) for start in range(comm.rank * 5, n, 5 * comm.world_size))
    return Slices(n, ranges or ((0, 0),))


# --- pruning


@patch.object(pruning_module, "PIECE", 100)
def pruning(comm: Comm, _results: Path) -> list[dict[str, Any]]:
    """`select_over_ranks` beside `select_entries_to_keep`, for all that a selection can be."""
    return [*_selections(comm), *_tops(comm), *_kths(comm), *_refusals(comm)]


def _selections(comm: Comm) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 1001):
        smooth = torch.rand(n, generator=generator)
        for kind, importance in {
            "smooth": smooth,
            "ties": (smooth * 4).floor() / 4,
            "equal": torch.ones(n),
            "zeros": torch.zeros(n),
            "tiny and huge": smooth.mul(80).sub(40).exp(),
        }.items():
            for selection in ({"topk": 0.1}, {"topk": 1}, {"topk": max(1, n - 1)}, {"topk": 3 * n}, {"topk": 1.0},
                              {"threshold": 0.5}, {"threshold": 0.25, "topk": 0.4}, {"topk": 0.3, "mask": smooth < 0.8},
                              {"topk": 0.37, "in_float32": True}):  # fmt: skip
                for interleaved in (False, True):
                    part = cut(n, comm, interleaved=interleaved)
                    ours = _told(lambda: select_over_ranks(comm, part, part.take(importance), **selection))  # noqa: B023
                    theirs = _told(lambda: select_entries_to_keep(n, importance=importance, **selection))  # noqa: B023
                    name = f"n={n} {kind} {sorted(selection)} {selection.get('topk')} interleaved={interleaved}"
                    yield {"name": name, "ours": ours, "theirs": theirs}


def _told(select: Callable[[], Tensor]) -> list[int] | str:
    try:
        return select().tolist()
    except UserError:
        return "nothing is kept"


def _tops(comm: Comm) -> Iterator[dict[str, Any]]:
    space = ParameterSpace([("a", (4, 5), torch.tensor([1, 2, 17])), ("b", (7,), None), ("c", (9, 3), None)])
    for interleaved in (False, True):
        for topk in (1, 5, 100):
            whole, mine = (
                new_model(space, slices=part) for part in (None, cut(len(space), comm, interleaved=interleaved))
            )
            for model in (whole, mine):
                model.decoder_weight.mul_(8).round_()  # ties
            for part in ("decoder-weight", "encoder-weight", "decoder-sum"):
                ours, theirs = top_over_ranks(comm, mine, part, topk), whole.get_topk_weights(part, topk)
                yield {"name": f"top {topk} of {part} interleaved={interleaved}", "ours": ours, "theirs": theirs}


def _kths(comm: Comm) -> Iterator[dict[str, Any]]:
    """Keys of all digits, some ranks without any."""
    keys = torch.randint(0, 2**62, (37,), generator=torch.Generator().manual_seed(5))
    keys = torch.cat([keys, keys[:5], torch.tensor([0, 2**63 - 1])])
    mine = keys[:0] if comm.rank == 1 else keys
    shared = keys[comm.rank :: comm.world_size]
    for k in (1, 2, 20, len(keys)):
        yield {
            "name": f"{k}-th smallest",
            "ours": kth_smallest(comm, lambda: shared.split(3), k),
            "theirs": _kth(keys, k),
        }
    copies = comm.world_size - 1
    found = kth_smallest(comm, lambda: [mine], copies * 3)
    yield {"name": "one rank has no key", "ours": found, "theirs": _kth(keys.repeat(copies), copies * 3)}


def _kth(keys: Tensor, k: int) -> tuple[int, int, int]:
    found = int(keys.sort().values[k - 1])
    return found, int((keys < found).sum()), int((keys == found).sum())


def _refusals(comm: Comm) -> Iterator[dict[str, Any]]:
    """Every rank must see that nothing is left, and say the same."""
    part = Slices.even(10, comm.rank, comm.world_size)
    try:
        select_over_ranks(comm, part, part.take(torch.arange(10.0)), threshold=11.0)
        message = "accepted"
    except UserError as error:
        message = str(error)
    said = comm.gather(message)
    yield {"name": "nothing left", "ours": said, "theirs": [said[0]] * comm.world_size}
    yield {"name": "the largest of all ranks", "ours": "importance is 9" in message, "theirs": True}


# --- weight files


def new_model(
    space: ParameterSpace, *, slices: Slices | None = None, seed: int = 2, **options: Any
) -> ParamMappedGradiendModel:
    """The same weights, whatever the slices."""
    return ParamMappedGradiendModel(space, slices=slices, generator=torch.Generator().manual_seed(seed), **options)


def flat_space(n: int) -> ParameterSpace:
    return ParameterSpace([("weight", (n,), None)])


FILES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1001, {}),
    "one_entry": (1, {}),
    "two_entries": (2, {"latent_dim": 3}),
    "latent_dim_3": (107, {"latent_dim": 3}),
    "no_decoder_bias": (53, {"bias_decoder": False}),
    "bfloat16": (201, {"torch_dtype": torch.bfloat16, "latent_dim": 2}),
}


@patch.object(weight_file, "TOGETHER", 64)
def write_files(comm: Comm, directory: Path, *, interleaved: bool) -> list[str]:
    """One file for each of FILES; in several blocks, as large ones are."""
    written = []
    for name, (n, options) in FILES.items():
        path = directory / f"{name}.safetensors"
        write_weights(new_model(flat_space(n), slices=cut(n, comm, interleaved=interleaved), **options), path, comm)
        written.append(name)
    return written


@patch.object(weight_file, "TOGETHER", 64)
def read_files(comm: Comm, directory: Path, *, interleaved: bool) -> dict[str, bool]:
    """Does a model with other weights read back those of the file, this rank's part of them?"""
    found = {}
    for name, (n, options) in FILES.items():
        part = cut(n, comm, interleaved=interleaved)
        model, expected = (new_model(flat_space(n), slices=part, seed=seed, **options) for seed in (8, 2))
        read_weights(model, directory / f"{name}.safetensors", comm)
        ours, theirs = model.state_dict(), expected.state_dict()
        found[name] = all(comm.gather(all(torch.equal(ours[key], theirs[key]) for key in theirs)))
    return found


def weight_files(comm: Comm, results: Path) -> dict[str, Any]:
    """Written together: on a shared file system, and where every rank has a file system of its own."""
    found: dict[str, Any] = {}
    for interleaved in (False, True):
        kind = "interleaved" if interleaved else "even"
        comm.first("making a directory", (results / kind).mkdir)
        write_files(comm, results / kind, interleaved=interleaved)
        found[f"read {kind}"] = read_files(comm, results / kind, interleaved=interleaved)
        found[f"read {kind} as the other kind"] = read_files(comm, results / kind, interleaved=not interleaved)
        found[f"{kind} leaves"] = sorted(os.listdir(results / kind))
    return {**found, **_each_alone(comm, results)}


def _each_alone(comm: Comm, results: Path) -> dict[str, Any]:
    """A relative path means another directory on every rank: what rank 0 writes the others do not see."""
    before, mine = Path.cwd(), results / f"alone_{comm.rank}"
    mine.mkdir()
    os.chdir(mine)
    try:
        if comm.is_first:
            Path("out").mkdir()
        comm.meet("making directories")
        write_files(comm, Path("out"), interleaved=True)
        read = read_files(comm, Path("out"), interleaved=True)
        seen = comm.gather(sorted(os.listdir("out")) if Path("out").exists() else None)
    finally:
        os.chdir(before)
    return {"read alone": read, "seen alone": seen}


# --- engines


@patch.object(chunks, "CHUNK", 100)
def engines(comm: Comm, _results: Path) -> dict[str, Any]:
    """`sliced` on all ranks beside `placed` on each, step by step, also with fewer entries than ranks."""
    found = {}
    for n in (1, 2, 7, 1001):
        for name, sizes, changes, options in (
            ("one item", (1,), {}, {}),
            ("three items", (3,), {"max_grad_norm": 0.02}, {}),
            ("two batches", (2, 1), {}, {"latent_dim": 2, "activation_decoder": "tanh"}),
            ("encoder", (2,), {"supervised": "encoder"}, {}),
            ("decoder", (2,), {"supervised": "decoder"}, {"bias_decoder": False}),
        ):
            for interleaved in (False, True):
                part = cut(n, comm, interleaved=interleaved)
                found[f"n={n} {name} interleaved={interleaved}"] = _compare(
                    comm, part, sizes, replace(OPTIONS, **changes), options
                )
    return {**found, "bad step": _bad_step(comm)}


def _compare(
    comm: Comm, part: Slices, sizes: tuple[int, ...], options: StepOptions, shape: dict[str, Any]
) -> dict[str, float]:
    n, space = part.total, flat_space(part.total)
    sliced = SlicedEngine(new_model(space, slices=part, **shape), options, comm)
    whole = SlicedEngine(new_model(space, **shape), options)
    start = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    reports, apart = [], 0.0
    for step in range(NUM_STEPS):
        batches = make_batches(n, sizes, step)
        expected, actual = whole.step(batches, 1e-2), sliced.step(take(batches, part), 1e-2)
        reports.append(comm.gather(actual.tolist()))
        apart = max(apart, _apart(actual, expected))
        if step == 2:
            for engine in (whole, sliced):
                engine.flip(with_decoder_bias=False)
    weights = {name: _taken(tensor, name, part) for name, tensor in whole.model.state_dict().items()}
    ours = sliced.model.state_dict()
    largest = {name: float(tensor.abs().max()) for name, tensor in whole.model.state_dict().items()}
    mine = max(float((ours[k] - weights[k]).abs().max()) / largest[k] if ours[k].numel() else 0.0 for k in ours)
    source = make_batches(n, (4,), 99)[0].source
    assert source is not None
    encoded = _apart(
        encode_slices(sliced.model, part_of_rows(source, part), comm), whole.model.forward_encoder(source).detach()
    )
    moved = max(float((tensor - start[name]).abs().max()) for name, tensor in whole.model.state_dict().items())
    return {
        "reports": apart,
        "weights": comm.largest(mine)[0],
        "encodings": comm.largest(encoded)[0],
        "moved": moved,
        "same on all ranks": float(all(row == rows[0] for rows in reports for row in rows)),
    }


def _bad_step(comm: Comm) -> dict[str, Any]:
    """A NaN among the entries of the last rank: no rank may move, every rank must hear of it."""
    part = Slices.even(101, comm.rank, comm.world_size)
    engine = SlicedEngine(new_model(flat_space(101), slices=part), OPTIONS, comm)
    batches = make_batches(101, (2,), 0)
    assert batches[0].source is not None
    batches[0].source[1, 100] = float("nan")
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    report = engine.step(take(batches, part), 1e-2)
    same = all(torch.equal(before[name], tensor) for name, tensor in engine.model.state_dict().items())
    return {"unchanged": comm.gather(same), "heard": comm.gather(not bool(report[:2].isfinite().all()))}


def make_batches(n: int, sizes: tuple[int, ...], step: int) -> list[GradiendBatch]:
    generator = torch.Generator().manual_seed(step)
    axis = torch.randn(n, generator=torch.Generator().manual_seed(99))
    batches = []
    for size in sizes:
        label = torch.randint(0, 2, (size, 1), generator=generator).float() * 2 - 1
        source = label * axis + 0.5 * torch.randn(size, n, generator=generator)
        batches.append(GradiendBatch(source, 2 * label * axis + 0.3 * torch.randn(size, n, generator=generator), label))
    return batches


def take(batches: list[GradiendBatch], part: Slices) -> list[GradiendBatch]:
    return [
        GradiendBatch(part_of_rows(batch.source, part), part_of_rows(batch.target, part), batch.label)  # type: ignore[arg-type]
        for batch in batches
    ]


def part_of_rows(rows: Tensor, part: Slices) -> Tensor:
    return torch.stack([part.take(row) for row in rows])


def _taken(tensor: Tensor, name: str, part: Slices) -> Tensor:
    if name == "encoder.0.linear.bias":
        return tensor
    return part_of_rows(tensor, part) if name == "encoder.0.linear.weight" else part.take(tensor)


def _apart(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


# --- memory

MEMORY_SIZE = 2_000_003


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that were made while it is on and are still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@patch.object(chunks, "CHUNK", 2**14)
@patch.object(model_module, "DRAWN_TOGETHER", 2**14)
@patch.object(weight_file, "TOGETHER", 2**16)
def memory(comm: Comm, results: Path) -> dict[str, Any]:
    """Peak bytes of living tensors on each rank: a new model, its engine, steps, an evaluation, a file written.

    x and y are those of one item, as in a plain step. Work areas that do not grow with n are made small beside n.
    Reading is left out: it maps the file, which looks like a tensor of size n and is no memory.
    """
    part = Slices.even(MEMORY_SIZE, comm.rank, comm.world_size)
    with LiveBytes() as live:
        _live(comm, part, results / "memory.safetensors")
    return {"peaks": comm.gather(live.peak), "left": comm.gather(live.now), "parts": comm.gather(part.size)}


def _live(comm: Comm, part: Slices, path: Path) -> None:
    model = new_model(flat_space(part.total), slices=part)
    engine: Engine = SlicedEngine(model, OPTIONS, comm)
    batch = GradiendBatch(torch.full((1, part.size), 0.5), torch.full((1, part.size), 0.25), torch.ones(1, 1))
    for _ in range(2):
        engine.step([batch], 1e-3)
    assert batch.source is not None
    encode_slices(engine.weights(), batch.source, comm)
    write_weights(engine.weights(), path, comm)


CHECKS: dict[str, Callable[[Comm, Path], Any]] = {
    "pruning": pruning,
    "weight_files": weight_files,
    "engines": engines,
    "memory": memory,
}


def work(comm: Comm, results: Path, *checks: str) -> None:
    """All ranks call this."""
    for name in checks or CHECKS:
        found = CHECKS[name](comm, results)
        if comm.is_first:
            (results / f"{name}.json").write_text(json.dumps(found))
        comm.meet(name)
