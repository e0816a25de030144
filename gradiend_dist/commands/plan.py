"""What a run will need, before it is started: steps, memory, disk space; and whether it can be had.

`forecast` is for the run that is about to start; the command `gradiend-dist plan` compares all engines and levels of
pruning for a model that need not be there, from its configuration alone (formulas: memory.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from gradiend_dist.commands.plain_parser import PlainParser
from gradiend_dist.commands.tables import table
from gradiend_dist.config.arguments import TrainingArguments
from gradiend_dist.config.checks import check_topk
from gradiend_dist.config.documents import DocumentError, parse_json, read_text
from gradiend_dist.engines.deepspeed_config import fits_zero
from gradiend_dist.errors import UserError, exit_code
from gradiend_dist.forecast import USABLE, base_of, num_weights, rows_at_once, run_of
from gradiend_dist.memory import (
    Base,
    Head,
    Need,
    Run,
    need_fsdp,
    need_offloaded,
    need_placed,
    need_sliced,
    need_zero,
    sliced,
)
from gradiend_dist.model.base import load_base_config, skeleton_of
from gradiend_dist.model.config_check import WHILE_BUILDING, check_files_hold, check_sizes, check_values, reason
from gradiend_dist.model.entries import count_to_keep
from gradiend_dist.space import ParameterSpace

GIB = 2**30


# What a closed form has where nothing else is asked for.
SPECTRAL_ITEMS = TrainingArguments().spectral_items

# Bytes of a weight.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Forecast:
    """Of a run that is about to start: what does not depend on how it is launched."""

    run: Run
    """With rows of the largest number of tokens that the arguments allow: none was read yet."""
    num_models: int
    """On disk at once: each seed's, and a better one while it is written; what is promoted shares its files."""

    @property
    def model_size(self) -> int:
        """Bytes of one model on disk."""
        return sliced(replace(self.run.head, seeds=1), self.run.head.n).weights

    @property
    def state_size(self) -> int:
        """Bytes of a training state: weights and moments of all seeds that are trained at once."""
        return sliced(self.run.head, self.run.head.n).host

    @property
    def disk(self) -> int:
        """Results, and the mapped files of a run that offloads."""
        mapped = self.model_size + need_offloaded(self.run).pre_prune if self.run.offloads else 0
        return self.num_models * self.model_size + mapped

    def lines(self, need: Need) -> list[tuple[str, str]]:
        """`need` is that of a process of this launch."""
        return [
            ("weights of the base model's backbone", f"{self.run.base.n:,}"),
            ("weights that are trained on", f"{self.run.head.n:,}"),
            ("memory: base model", gib(need.base)),
            ("memory: encoder, decoder and moments", gib(need.weights + need.moments)),
            ("memory: gradients of one step", gib(max(need.gradients, need.pre_prune))),
            ("memory: sketches of gradients", gib(max(need.held_out, need.spectral))),
            ("disk: one model / at most at once", f"{gib(self.model_size)} / {gib(self.disk)}"),
        ]


def forecast(model: str, args: TrainingArguments) -> Forecast:
    """From the model's configuration alone."""
    config = load_base_config(model, trust_remote_code=args.trust_remote_code)
    skeleton = skeleton_of(config, model, _NoTokenizer, trust_remote_code=args.trust_remote_code)
    if Path(model).is_dir():
        check_files_hold(Path(model), num_weights(skeleton), f"model={model!r}")
    base = base_of(skeleton, ParameterSpace.of_model(skeleton, args.params), DTYPES[args.torch_dtype])
    return Forecast(run_of(base, args, args.max_length), args.max_seeds + 1)


class _NoTokenizer:
    """Stands for a tokenizer where the architecture alone must tell: unknown ones are taken as masked."""

    mask_token = "[MASK]"


def check_output(name: str, path: Path, needed: int) -> None:
    """The directory of argument `name` can be made and written to, and the disk has room for what will be in it."""
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"{name}={path} cannot be a directory, {existing} is a file: pass another {name}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{name}={path}: {existing} cannot be written to: pass another one, or change its permissions.")
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{name}={path} needs {gib(needed)} on disk, {gib(free)} are free: free some, pass another {name}, or "
            "prune with pre_prune_config."
        )


def check_memory(needs: Forecast, need: Need, args: TrainingArguments, free: float, device: str) -> None:
    """What a process of this launch has to have at once: the base model, and, but for what is offloaded, the rest."""
    resident = need.base + need.weights + need.moments
    if resident <= free:
        return
    remedies = ["launch on more GPUs (gradiend-dist plan says how many)"]
    smaller = replace(needs.run.head, n=needs.run.base.n // 100)
    if need.base + sliced(smaller, smaller.n).weights * 3 <= free and not needs.run.is_pruned:
        remedies.insert(0, "pass pre_prune_config with topk 0.01")
    if need.base <= free and not args.offload:
        remedies.insert(0, "pass offload=true")
    raise UserError(
        f"Base model, encoder, decoder and moments need {gib(resident)} on {device}, where {gib(free)} are free: "
        f"{', or '.join(remedies)}."
    )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


# --- gradiend-dist plan

NAME = "gradiend-dist plan"


def make_parser() -> argparse.ArgumentParser:
    parser = PlainParser(
        prog=NAME,
        allow_abbrev=False,
        description="Memory per GPU, bytes sent per step and what fits, for every engine and pruning level; from the "
        "model's configuration alone.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="path (config.json is enough) or hub id of the base model")
    source.add_argument("--config_json", type=Path, help="a config.json file")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs in all (8)")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="more GPUs than this are several nodes (8)")
    parser.add_argument("--gpu_memory", type=float, default=80.0, help="GiB of one GPU (80)")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES), help="of the base model (bfloat16)")
    parser.add_argument(
        "--pre_prune_topk", type=float, nargs="+", default=[1.0, 0.1, 0.01], help="kept shares; 1: none (1 0.1 0.01)"
    )
    parser.add_argument("--params", nargs="+", help="names or wildcards of the weights to train on (all)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds that are trained at once (1)")
    parser.add_argument("--latent_dim", type=int, default=1)
    parser.add_argument("--gradiend_batch_size", type=int, default=1, help="gradient vectors in one step (1)")
    parser.add_argument("--train_batch_size", type=int, default=32, help="rows in one gradient, over all ranks (32)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the longest row (64)")
    parser.add_argument(
        "--spectral_items", type=int, default=0, help="items of initialization=spectral; 0: a random start (0)"
    )
    parser.add_argument(
        "--closed_form", action="store_true", help="no step is trained: max_steps=0, of 16 spectral_items by default"
    )
    parser.add_argument(
        "--gradient_checkpointing", action="store_true", help="layers are computed again in the backward pass"
    )
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--json", action="store_true", help="the numbers in bytes, as JSON")
    return parser


@dataclass(frozen=True)
class Line:
    """One engine at one pruning level."""

    engine: str
    launch: str
    """File below accelerate_configs."""
    topk: float
    trained: int
    need: Need
    fits: bool
    store: int
    """What is left for gradients that are used again."""

    def to_dict(self) -> dict[str, Any]:
        need = {**vars(self.need), "peak": self.need.peak}
        return {**vars(self), "need": need}


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> int:
        print(answer(sys.argv[1:] if argv is None else argv))
        return 0

    return exit_code(NAME, work)


def answer(argv: Sequence[str]) -> str:
    """What `gradiend-dist plan` prints."""
    options = make_parser().parse_args(list(argv))
    check_options(options)
    model, name = named_skeleton(options)
    base = base_of(model, ParameterSpace.of_model(model, options.params), DTYPES[options.dtype])
    lines = [line for topk in options.pre_prune_topk for line in lines_at(base, topk, options)]
    best = recommended(lines, options.gpus)
    if options.json:
        found = [{**line.to_dict(), "recommended": line is best} for line in lines]
        return json.dumps({"model": name, "n": base.n, "num_weights": base.total, "lines": found}, indent=1)
    return as_table(name, base, lines, best, options)


def check_options(options: argparse.Namespace) -> None:
    for name in ("gpus", "gpus_per_node", "seeds", "latent_dim", "gradiend_batch_size", "train_batch_size", "tokens"):
        if getattr(options, name) < 1:
            raise UserError(f"{name}={getattr(options, name)} is not positive: pass 1 or more.")
    if options.spectral_items < 0:
        raise UserError(f"spectral_items={options.spectral_items} is negative: pass e.g. 16, or 0 for a random start.")
    if not 0 < options.gpu_memory < float("inf"):
        raise UserError(f"gpu_memory={options.gpu_memory} is not positive: pass the GiB of one GPU.")
    for topk in options.pre_prune_topk:
        check_topk("pre_prune_topk", topk)


def named_skeleton(options: argparse.Namespace) -> tuple[nn.Module, str]:
    name, trusted = options.model or str(options.config_json), options.trust_remote_code
    config = load_base_config(name, trust_remote_code=trusted) if options.model else read_config(options.config_json)
    return skeleton_of(config, name, _NoTokenizer, trust_remote_code=trusted), name


def read_config(path: Path) -> Any:
    """The configuration in a JSON file of any name."""
    try:
        values = parse_json(read_text(path))
    except DocumentError as error:
        raise UserError(f"config_json={path} cannot be read or is no JSON: {error}.") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UserError(f"config_json={path} names no model_type: pass the config.json of a language model.")
    check_values(values, f"config_json={path}")
    kind = values.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **values)
    except WHILE_BUILDING as error:
        raise UserError(f"config_json={path} is no configuration that can be read: {reason(error)}") from error
    check_sizes(config, f"config_json={path}")
    if config.is_encoder_decoder:
        raise UserError(f"config_json={path} is that of an encoder-decoder model: pass a masked or a causal one.")
    return config


def lines_at(base: Base, topk: float, options: argparse.Namespace) -> Iterator[Line]:
    trained, items = count_to_keep(topk, base.n), options.spectral_items
    head = Head(
        trained,
        options.latent_dim,
        items=options.gradiend_batch_size,
        seeds=options.seeds,
        spectral_items=items or (SPECTRAL_ITEMS if options.closed_form else 0),
    )
    run = Run(
        base,
        head,
        options.train_batch_size,
        options.tokens,
        options.gradient_checkpointing,
        has_steps=not options.closed_form,
    )
    usable = USABLE * options.gpu_memory * GIB
    several_nodes = options.gpus > options.gpus_per_node
    for engine, launch, need in needs_of(run, options.gpus, usable, several_nodes=several_nodes):
        works = not engine.startswith("zero") or fits_zero(trained, options.latent_dim)
        yield Line(engine, launch, topk, trained, need, works and need.peak <= usable, max(0, int(usable) - need.peak))


def needs_of(run: Run, gpus: int, usable: float, *, several_nodes: bool) -> Iterator[tuple[str, str, Need]]:
    """(engine, Accelerate file, needs) for every way to launch on these GPUs."""
    nodes = "_nodes" if several_nodes else ""
    for count in range(1, min(gpus, 3) + 1):
        yield f"placed, {count} GPU{'s' if count > 1 else ''}", "single.yaml", need_placed(run, count)
    yield "1 GPU, offload", "single.yaml", need_offloaded(run)
    if gpus == 1:
        return
    whole_items = replace(run, rows=rows_at_once(run, gpus, usable))
    yield "sliced", f"multi_gpu{nodes}.yaml", need_sliced(whole_items, gpus)
    if run.base.layer_sizes:
        yield "sliced, FSDP2 base", f"fsdp2{nodes}.yaml", need_fsdp(run, gpus)
    for stage in (1, 2, 3):
        yield f"zero{stage}", f"zero{stage}.yaml", need_zero(run, stage, gpus)
    yield "zero3, offload", "zero3_offload.yaml", need_zero(run, 3, gpus, offload=True)


def recommended(lines: Sequence[Line], gpus: int) -> Line | None:
    """Of what fits: the least pruning; then what uses all GPUs, the base whole rather than cut, DeepSpeed last.

    A single process is for a single GPU: on more it leaves all but one idle at any time.
    """
    order = ["placed, 1 GPU", "1 GPU, offload"] if gpus == 1 else ["sliced", "sliced, FSDP2 base", "zero3, offload"]
    fitting = [line for line in lines if line.fits and line.engine in order]
    return min(fitting, key=lambda line: (-line.topk, order.index(line.engine)), default=None)


PARTS = ("base", "weights", "moments", "x, y", "indices", "buffers", "pruning", "sketches", "peak")

COLUMNS = ("keeps", "engine", *PARTS, "fits", "store", "sent", "host", "launch with")


def as_table(name: str, base: Base, lines: Sequence[Line], best: Line | None, options: argparse.Namespace) -> str:
    rows = []
    for line in lines:
        need = line.need
        held = (need.base, need.weights, need.moments, need.gradients, need.indices)
        parts = (*held, need.buffers, need.pre_prune, max(need.held_out, need.spectral), need.peak)
        mark = f"accelerate_configs/{line.launch}{'   <- recommended' if line is best else ''}"
        keeps = "all" if line.topk == 1.0 else f"{100 * line.topk:g} %"
        sizes = (
            *map(plain, parts),
            "yes" if line.fits else "no",
            plain(line.store),
            plain(need.sent),
            plain(need.host),
        )
        rows.append((keeps, line.engine, *sizes, mark))
    head = (
        f"{name}: {base.total:,} weights, {base.n:,} in the backbone's space; {options.dtype}, {options.gpus} GPUs of "
        f"{options.gpu_memory:g} GiB, {options.seeds} seed{'s' if options.seeds > 1 else ''} at once\n"
        "GiB of the fullest GPU (buffers: of a step or of a pass of the base, whichever is more; pruning: vectors of "
        "pre-pruning, on the host where there is no room for them; sketches: of held-out items or, before there "
        f"are moments, of a spectral start; fits: peak within {100 * USABLE:g} %, and for "
        "DeepSpeed no weight of 2^31 entries; store: what that leaves for "
        "gradients that are used again),\n"
        "GiB sent per GPU and step with new gradients, GiB of host memory per rank while a state is saved (offload: "
        "in mapped files, of which as much is in memory as there is room for; launch with offload: true)\n"
    )
    words = "" if best is not None else "\nNothing fits: use more GPUs, larger ones, or prune more (--pre_prune_topk)."
    return f"{head}\n{table(COLUMNS, rows)}{words}"


def plain(num_bytes: int) -> str:
    """GiB with three figures."""
    value = num_bytes / GIB
    if value and value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
