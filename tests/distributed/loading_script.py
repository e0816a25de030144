"""Loads every base model in two ways on the ranks that it was started on: see test_loading.py.

MODELS holds what test_loading.py wrote; what rank 0 has to say about each goes to RESULTS/found.json.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gradiend_dist import TrainingArguments
from gradiend_dist.distributed.fsdp import is_sharded, shard_model
from gradiend_dist.engines.spread import Spread
from gradiend_dist.errors import UserError
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.cloze import Cloze, ClozeRow, choose_objective
from gradiend_dist.gradients.forward_mode import row_products
from gradiend_dist.gradients.items import Item
from gradiend_dist.model.base import load_base_model
from gradiend_dist.space import ParameterSpace

# Those whose rows are encoded as well.
ENCODED = ("bert-float32", "gpt2-float32", "llama-float32")


def gradients(spread: Spread, model: nn.Module, tokenizer: Any) -> tuple[torch.Tensor, nn.Module, BaseGradients]:
    """This rank's part of an item's gradient, the model as it is placed, and what computes."""
    space = ParameterSpace.of_model(model)
    spread, model = spread.place_base_model(model, space)
    objective = choose_objective("auto", model, tokenizer, max_length=16, mask_placeholder="[MASK]", as_reference=False)
    rows = tuple(
        ClozeRow(Cloze((3, 5 + row, 4, 7), (2,), (6,)), Cloze((3, 5 + row, 4, 7), (2,), (8,))) for row in range(5)
    )
    base = BaseGradients(
        model, tokenizer, objective, space, comm=spread.comm, slices_by_rank=spread.training_slices(space),
        shards=spread.own_shards(), shards_by_rank=spread.shards,
    )  # fmt: skip
    return base.compute(Item(rows), ["diff"])["diff"], model, base


def encodings_differ(base: BaseGradients) -> float:
    """By how much encodings of rows in one pass differ from those of their gradients, of the largest of them.

    More rows than a pass has, and of another number of tokens in each word. All ranks call this.
    """
    clozes = [Cloze((3, 5 + row, 4, 9, 7)[: 3 + row % 3], (2,), (6 + row,)) for row in range(5)]
    others = [Cloze((3, 5 + row, 4, 7)[: 3 + row % 2], (2,), (8,)) for row in range(5)]
    items = [Item((ClozeRow(*pair),)) for pair in zip(clozes, others, strict=True)]
    generator = torch.Generator().manual_seed(3)
    weight = torch.stack([base.slices.take(torch.randn(base.space.size, generator=generator)) for _ in range(2)])
    by_gradient = torch.stack([weight.double() @ base.compute(item, ["diff"])["diff"].double() for item in items])
    by_rows = row_products(base, items, "diff", weight, 1)
    expected, found = base.comm.total(by_gradient), base.comm.total(by_rows)
    return float((found - expected).abs().max() / expected.abs().max())


def state(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Of each weight and buffer: this rank's entries, and what else must be the same."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found[name] = (local.detach().clone(), tuple(tensor.shape), tensor.requires_grad, str(tensor.device))
    return found


def shared(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def differences(ours: dict[str, tuple[Any, ...]], theirs: dict[str, tuple[Any, ...]]) -> list[str]:
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    found = []
    for name, (entries, *facts) in ours.items():
        others, *other_facts = theirs[name]
        same = entries.dtype == others.dtype and torch.equal(entries, others) and facts == other_facts
        if not same:
            found.append(f"{name}: {tuple(entries.shape)} {entries.dtype} {facts}, not {other_facts}")
    return found


def compare(spread: Spread, path: Path, dtype: str) -> dict[str, Any]:
    """By rows, and whole and then cut. All ranks call this."""
    cut, device = spread.cut_of(None), spread.placement.base_model
    model, tokenizer = load_base_model(str(path), torch_dtype=dtype, device=device, cut=cut)
    by_rows = is_sharded(model)
    whole, _ = load_base_model(str(path), torch_dtype=dtype, device=device)
    config = whole.config.to_dict() == model.config.to_dict()  # type: ignore[operator, union-attr]
    gradient, model, base = gradients(spread, model, tokenizer)
    encodings = encodings_differ(base) if path.name in ENCODED else None
    spread.recompute_layers(model, asked=True)
    recomputed, model, _ = gradients(spread, model, tokenizer)
    expected, whole, _ = gradients(spread, whole, tokenizer)
    return {
        "by_rows": by_rows,
        "differences": differences(state(model), state(whole)),
        "same_config": config,
        "same_class": type(model).__name__ == type(whole).__name__,
        "shared": shared(model) == shared(whole),
        "num_shared": len(shared(model)),
        "gradient": bool(torch.equal(gradient, expected)),
        "recomputed": bool(torch.equal(recomputed, expected)),
        "norm": float(gradient.norm()),
        "encodings": encodings,
    }


def refused(spread: Spread, path: Path) -> str | None:
    try:
        load_base_model(str(path), device=spread.placement.base_model, cut=spread.cut_of(None))
    except UserError as error:
        return str(error)
    return None


class Block(nn.Module):
    """As many experts as ranks, of which each rank uses its own alone."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ranks, 6, dtype=torch.bfloat16))
        self.experts = nn.ModuleList(nn.Linear(5, 5, bias=False, dtype=torch.bfloat16) for _ in range(ranks))

    def forward(self, entries: torch.Tensor, expert: int) -> torch.Tensor:
        ones = torch.ones(5, dtype=torch.bfloat16) * (1 + expert)
        return (self.weight * entries).sum() + self.experts[expert](ones).sum()


class Blocks(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.embeddings, self.block = nn.Embedding(3, 5, dtype=torch.bfloat16), Block(ranks)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def forward(self, entries: torch.Tensor, expert: int) -> torch.Tensor:
        return self.block(entries, expert)


def whole_gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor().float()


def reductions(spread: Spread) -> dict[str, list[float]]:
    """What the gradients of the ranks add up to. All ranks call this."""
    rank, ranks = spread.comm.rank, spread.comm.world_size
    model = Blocks(ranks)
    plugin = spread.launch.accelerator.state.fsdp_plugin
    shard_model(model, plugin, torch.device("cpu"), {name for name, _ in model.named_parameters()})
    # In each order of the ranks, since each sum may have another one.
    orders = [[order[rank] for order in itertools.permutations((256.0, 0.75, -256.0))]] * ranks
    model(torch.tensor(orders, dtype=torch.bfloat16), rank).backward()
    sums = whole_gradient(model.block.weight).unique().tolist()
    return {"sums": sums, "experts": [float(whole_gradient(e.weight).mean()) for e in model.block.experts]}


def main() -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # see tiny.without_onednn
    models, results = map(Path, sys.argv[1:3])
    spread = Spread.of(TrainingArguments(ddp_timeout=60))
    assert spread.launch.shards_base
    found = {}
    for path in sorted(models.iterdir()):
        name, _, dtype = path.name.partition("-")
        if name == "broken":
            mine: Any = refused(spread, path)
        else:
            mine = compare(spread, path, dtype)
        found[path.name] = spread.comm.gather(mine)
    for name, mine in reductions(spread).items():
        found[name] = spread.comm.gather(mine)
    if spread.comm.is_first:
        (results / "found.json").write_text(json.dumps(found))
    spread.comm.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
