"""Gradients that are used again are kept: the base model is frozen, so an item has the same ones at every visit."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradiend_dist.gradients.base import AddToVectors, BaseGradients, progress_over
from gradiend_dist.gradients.buckets import Deliver
from gradiend_dist.gradients.items import Item
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.files import explained

logger = logging.getLogger(__name__)

# Entries of a model's configuration that say where it comes from, not what it computes.
WITHOUT_EFFECT = ("_name_or_path", "transformers_version")


@dataclass
class GradientStore:
    """Gradients that will be used again: in memory under a budget, on disk where asked for.

    First come, first kept: items are visited in cycles, where throwing out the oldest would throw out the next.
    """

    budget_bytes: int
    directory: Path | None = None
    """Directory of this model, tokenizer, space and objective (see `store_directory`); None: memory only."""
    bytes_per_vector: int | None = None
    """What a vector counts for: on every rank the largest rank's, so that all keep the same. None: what it has."""
    used_bytes: int = 0
    hits: int = 0
    misses: int = 0
    _memory: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def get(self, item_key: str, kind: str) -> Tensor | None:
        vector = self._memory.get((item_key, kind))
        if vector is None and self.directory is not None:
            vector = self._read(item_key, kind)
            if vector is not None:
                self._remember(item_key, kind, vector)
        return vector

    def in_memory(self, item_key: str, kind: str) -> bool:
        return (item_key, kind) in self._memory

    def is_kept(self, item_key: str, kind: str) -> bool:
        on_disk = self.directory is not None and self._path(item_key, kind).exists()
        return on_disk or self.in_memory(item_key, kind)

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.budget_bytes

    def put(self, item_key: str, kind: str, vector: Tensor) -> None:
        """Keep a vector; the caller hands it over and must not write to it again."""
        self._remember(item_key, kind, vector)
        if self.directory is not None:
            self._write(item_key, kind, vector)

    def _remember(self, item_key: str, kind: str, vector: Tensor) -> None:
        size = self.bytes_per_vector or vector.numel() * vector.element_size()
        if self.has_room(size) and (item_key, kind) not in self._memory:
            self._memory[item_key, kind] = vector
            self.used_bytes += size

    def _path(self, item_key: str, kind: str) -> Path:
        assert self.directory is not None
        return self.directory / f"{kind}_{item_key}.safetensors"

    def _read(self, item_key: str, kind: str) -> Tensor | None:
        """A stored gradient, or None if it is absent or damaged (then it is computed again)."""
        path = self._path(item_key, kind)
        if not path.exists():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                vector: Tensor = file.get_tensor("gradient")
                expected = (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError) as error:
            logger.warning("cached gradient %s is damaged and computed again: %s", path.name, error)
            return None
        if expected != checksum(vector):
            logger.warning("cached gradient %s does not match its checksum and is computed again", path.name)
            return None
        return vector

    def _write(self, item_key: str, kind: str, vector: Tensor) -> None:
        path = self._path(item_key, kind)
        # Ranks that each have all of a vector write the same file at the same time.
        temporary = path.with_suffix(f".{secrets.token_hex(4)}.partial")
        vector = vector.cpu()
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                save_file({"gradient": vector}, str(temporary), metadata={"sha256": checksum(vector)})
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)


class GradientSource:
    """Gradients of items: from the store where they are, computed and kept where they will be wanted again.

    All ranks that compute together call every method, with the same items.
    """

    def __init__(self, base: BaseGradients, store: GradientStore) -> None:
        self.base = base
        self.store = store
        self.store.bytes_per_vector = base.bytes_per_vector
        self._scratch: dict[str, Tensor] = {}

    def get(self, item: Item, kinds: Sequence[str], *, keep: bool) -> dict[str, Tensor]:
        """The wanted gradients; those that were not kept are overwritten by the next call."""
        kinds = list(dict.fromkeys(kinds))
        key = item.key
        found = self._read_by_everyone(key, kinds)
        missing = [kind for kind, vector in found.items() if vector is None]
        if not missing:
            self.store.hits += 1
            return {kind: vector.to(self.base.device) for kind, vector in found.items() if vector is not None}
        self.store.misses += 1
        size = self.base.bytes_per_vector * len(missing)
        keep = (keep and self.store.has_room(size)) or self.store.directory is not None
        out = {kind: self.base.empty() for kind in missing} if keep else self._reusable(missing)
        computed = self.base.compute(item, missing, out=out)
        if keep:
            for kind in missing:
                self.store.put(key, kind, computed[kind])
        return {kind: computed[kind] if v is None else v.to(self.base.device) for kind, v in found.items()}

    def holds(self, items: Sequence[Item], kind: str, *, will_keep: bool) -> bool:
        """Are these gradients in memory, or, if they `will_keep`, will they be?"""
        missing = sum(not self.store.in_memory(item.key, kind) for item in items)
        if self.store.directory is not None:
            return True
        return missing == 0 or (will_keep and self.store.has_room(self.base.bytes_per_vector * missing))

    def will_keep(self, items: Sequence[Item], kinds: Sequence[str]) -> bool:
        """Is the store made for these? By its size alone: a run that goes on has to find the same."""
        size = self.base.bytes_per_vector * len(dict.fromkeys(kinds)) * len(items)
        return self.store.directory is not None or size <= self.store.budget_bytes

    def hand_out(
        self,
        items: Sequence[Item],
        kinds: Sequence[str],
        deliver: Deliver,
        *,
        complete: bool = False,
        whole_items: bool = False,
        bar: str | None = None,
    ) -> None:
        """The gradients of these items: from the store, where they are kept for later, or computed and forgotten piece
        by piece, see `BaseGradients.hand_out`. With `whole_items`, each rank computes items of its own."""
        if not self.will_keep(items, kinds):
            self.store.misses += len(items)
            self.base.hand_out(items, kinds, deliver, complete=complete, bar=bar)
            return
        if whole_items:
            self.prepare(items, kinds)
        with progress_over(len(items), bar, self.base.comm) as progress:
            for number, item in enumerate(items):
                for kind, vector in self.get(item, kinds, keep=True).items():
                    deliver(number, [(kind, 1.0)], slice(0, len(vector)), vector)
                progress.update()

    def has(self, item: Item, kinds: Sequence[str]) -> bool:
        """Are these kept, on every rank? Files are not read for that: a damaged one shows when it is wanted."""
        here = all(self.store.is_kept(item.key, kind) for kind in dict.fromkeys(kinds))
        return here if self.store.directory is None else self.base.comm.all_agree(here)

    def prepare(self, items: Sequence[Item], kinds: Sequence[str]) -> None:
        """Compute and keep those that are missing, a whole item on each rank: for items that will be wanted soon.

        Where an item's rows are split over the ranks instead, a pass has few rows, and ranks without one have no work.
        """
        kinds = list(dict.fromkeys(kinds))
        if not self.base.in_rounds:
            return
        missing = [item for item in items if not self.has(item, kinds)]
        size = self.base.bytes_per_vector * len(kinds)
        for together in self._rounds(missing):
            if not self.store.has_room(size * len(together)) and self.store.directory is None:
                return
            vectors = [{kind: self.base.empty() for kind in kinds} for _ in together]
            self.base.compute_round(together, kinds, AddToVectors(vectors))
            for item, found in zip(together, vectors, strict=True):
                for kind in kinds:
                    self.store.put(item.key, kind, found[kind])

    def _rounds(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        size = self.base.comm.world_size
        for start in range(0, len(items), size):
            yield items[start : start + size]

    def _read_by_everyone(self, key: str, kinds: Sequence[str]) -> dict[str, Tensor | None]:
        """Each file is read and hashed once, which costs as much as a pass of a small model.

        On disk a file may be missing or damaged for one rank alone; in memory all ranks keep the same.
        """
        found = {kind: self.store.get(key, kind) for kind in kinds}
        if self.store.directory is None:
            return found
        return {kind: v if self.base.comm.all_agree(v is not None) else None for kind, v in found.items()}

    def _reusable(self, kinds: list[str]) -> dict[str, Tensor]:
        for kind in kinds:
            if kind not in self._scratch:
                self._scratch[kind] = self.base.empty()
        return {kind: self._scratch[kind] for kind in kinds}


def checksum(vector: Tensor) -> str:
    return hashlib.sha256(vector.contiguous().numpy().data).hexdigest()  # no copy


def model_fingerprint(model: nn.Module) -> str:
    """Hash of the configuration and of names, dtypes and bytes of all weights: a fine-tuned copy is another model."""
    config: Any = model.config
    settings = sorted((key, repr(value)) for key, value in config.to_dict().items() if key not in WITHOUT_EFFECT)
    digest = hashlib.sha256(repr(settings).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{parameter.dtype}{tuple(parameter.shape)}".encode())
        # A shard alone would not tell a change in another rank's; all ranks ask, for one weight at a time.
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def store_directory(root: Path, model: nn.Module, tokenizer: Any, space: ParameterSpace, base: BaseGradients) -> Path:
    """One directory per all that a gradient depends on besides its item."""
    objective = base.objective
    vocabulary = sorted(tokenizer.get_vocab().items())
    facts = (
        model_fingerprint(model),
        hashlib.sha256(repr(vocabulary).encode()).hexdigest(),
        space.fingerprint(),
        objective.name,
        str(base.autocast),
    )
    return root / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
