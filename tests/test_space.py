"""Which entries form the vector and where they are: order, offsets, selections, and the map back to the base model."""

from __future__ import annotations

import re
from math import prod

import pytest
import tiny
import torch
from torch import Tensor

from gradiend_dist.errors import UserError
from gradiend_dist.space import INT32_MAX, ParameterSpace, Slices, Weight

# Empty weights in front, in the middle, two in a row, and at the end are what the maps back must survive.
SHAPES = [("w0", (3, 5)), ("w1", (7,)), ("w2", (2, 2, 3)), ("w3", (1,)), ("w4", (11, 3)), ("w5", (4,))]


def space_of(shapes: list[tuple[str, tuple[int, ...]]]) -> ParameterSpace:
    return ParameterSpace([(name, shape, None) for name, shape in shapes])


def random_positions(size: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(size, generator=generator)[:count].sort().values


BACKBONES = [
    ("bert", "bert.", {}),
    ("gpt2", "transformer.", {}),
    ("llama", "model.", {"tie_word_embeddings": True}),
    ("llama", "model.", {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("family", "prefix", "options"), BACKBONES)
def test_of_model__is_the_backbone_in_model_order(family, prefix, options):
    """Fails if a head slips in, a tied weight counts twice or not at all, or the order is not the model's."""
    model = tiny.base_model(family, 67, **options)
    expected = [(n, tuple(p.shape)) for n, p in model.named_parameters() if n.startswith(prefix)]
    assert 0 < len(expected) < len(list(model.named_parameters(remove_duplicate=False)))
    space = ParameterSpace.of_model(model)
    assert [(w.name, w.shape) for w in space.weights] == expected
    start = 0
    for weight, (_, shape) in zip(space.weights, expected, strict=True):
        assert (weight.base_offset, weight.offset, weight.num_selected) == (start, start, prod(shape))
        start += prod(shape)
    assert space.size == space.full_size == len(space) == start
    assert not space.is_pruned and space.active() == list(space.weights)


def test_of_model__excludes_the_head_of_an_untied_model_and_names_the_tied_one_once():
    tied, untied = (tiny.base_model("llama", 67, tie_word_embeddings=tie) for tie in (True, False))
    assert "lm_head.weight" in dict(untied.named_parameters())
    for model in (tied, untied):
        names = [w.name for w in ParameterSpace.of_model(model).weights]
        assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["bert.encoder.layer.1.*"], lambda name: name.startswith("bert.encoder.layer.1.")),
        (["*.bias", "bert.emb*"], lambda name: name.endswith(".bias") or name.startswith("bert.emb")),
        (["bert.*.0.*query*"], lambda name: ".0." in name and "query" in name),
        (["*", "bert.embeddings.LayerNorm.bias"], lambda _: True),
        (["bert.embeddings.LayerNorm.bias"], lambda name: name == "bert.embeddings.LayerNorm.bias"),
    ],
)
def test_of_model__patterns_restrict_it_and_keep_the_model_order(patterns, expected):
    """Fails if the order follows the patterns, a weight comes twice, or `*` stops at a dot."""
    model = tiny.base_model("bert", 67)
    everything = [w.name for w in ParameterSpace.of_model(model).weights]
    wanted = [name for name in everything if expected(name)]
    assert [w.name for w in ParameterSpace.of_model(model, patterns).weights] == wanted


@pytest.mark.parametrize(
    "pattern", ["cls.*", "bert.encoder.layer.1", "encoder.layer*", "bertXembeddings*", "bert.embeddings.LayerNorm.bia."]
)
def test_of_model__a_pattern_without_a_match_is_an_error_that_names_it(pattern):
    """Fails if a typo or a head is ignored in silence, or if the pattern is taken as a regular expression."""
    model = tiny.base_model("bert", 67)
    with pytest.raises(UserError, match=re.escape(f"params pattern {pattern!r}")):
        ParameterSpace.of_model(model, ["bert.embeddings.*", pattern])


@pytest.mark.parametrize("count", [1, 5, 23, 71, 72])
def test_select__gives_ascending_entries_at_running_offsets(count):
    full = space_of(SHAPES)
    keep = random_positions(full.size, count, seed=count)
    pruned = full.select(keep)
    assert [w.name for w in pruned.weights] == [name for name, _ in SHAPES]
    assert (pruned.size, pruned.full_size, pruned.is_pruned) == (count, full.size, count != full.size)
    entries = torch.cat([w.base_offset + w.flat_indices() for w in pruned.weights])
    assert entries.tolist() == keep.tolist()
    starts = [w.offset for w in pruned.weights]
    assert starts == [sum(w.num_selected for w in pruned.weights[:i]) for i in range(len(SHAPES))]
    assert [w.name for w in pruned.active()] == [w.name for w in pruned.weights if w.flat_indices().numel()]


@pytest.mark.parametrize("seed", range(6))
def test_select__twice_is_select_of_the_composition(seed):
    full = space_of(SHAPES)
    first = random_positions(full.size, 31, seed)
    second = random_positions(31, 13, seed + 100)
    twice, once = full.select(first).select(second), full.select(first[second])
    assert twice == once and twice.fingerprint() == once.fingerprint()
    assert [w.offset for w in twice.weights] == [w.offset for w in once.weights]


def test_select__of_everything_is_the_same_space():
    full = space_of(SHAPES)
    again = full.select(torch.arange(full.size))
    assert again == full and all(w.selected is None for w in again.weights)


def test_select__takes_64_bit_positions_only():
    with pytest.raises(AssertionError, match="64-bit"):
        space_of(SHAPES).select(torch.tensor([1, 2], dtype=torch.int32))


@pytest.mark.parametrize(
    "keep",
    [
        [71],  # all weights but the last are empty
        [0, 1, 14],  # all but the first
        [15, 21, 35, 36, 67],  # w0, w2 and w5 are empty
        list(range(72)),
        [3, 22, 33, 34, 70],
    ],
)
def test_base_global__inverts_select(keep):
    """Fails where a weight without a selected entry shares its offset with its neighbour."""
    full = space_of(SHAPES)
    pruned = full.select(torch.tensor(keep))
    assert pruned.base_global(torch.arange(len(keep))).tolist() == keep
    backwards = torch.arange(len(keep)).flip(0)
    assert pruned.base_global(backwards).tolist() == keep[::-1]
    every_other = torch.arange(0, len(keep), 2)
    assert pruned.select(every_other).base_global(torch.arange(len(every_other))).tolist() == keep[::2]


def test_base_global__is_64_bit():
    """Two weights of 2^31 - 1 entries: positions beyond 2^32 come out whole."""
    selected = [torch.tensor([5]), torch.tensor([INT32_MAX - 1]), torch.tensor([7])]
    space = ParameterSpace([(f"w{i}", (INT32_MAX,), s) for i, s in enumerate(selected)])
    assert space.base_global(torch.arange(3)).tolist() == [5, 2 * INT32_MAX - 1, 2 * INT32_MAX + 7]


@pytest.mark.parametrize(
    ("numel", "last_as_indices"),
    [
        (100, 19),  # 4 * 20 is not below 0.8 * 100
        (101, 20),
        (10, 1),
        (4, 0),
        (INT32_MAX, 429496729),
        (INT32_MAX + 1, 214748364),  # 8 bytes per index
    ],
)
def test_representation__follows_the_density_rule_of_the_file_format(numel, last_as_indices):
    """Fails at the first count on either side of the border; `meta` entries take no memory."""

    def with_selected(count: int) -> str:
        return Weight("w", (numel,), 0, 0, torch.empty(count, dtype=torch.int64, device="meta")).representation()

    assert with_selected(0) == "indices"
    assert with_selected(last_as_indices) == "indices"
    assert with_selected(last_as_indices + 1) == "mask"
    assert with_selected(numel - 1) == "mask"
    assert with_selected(numel) == Weight("w", (numel,), 0, 0, None).representation() == "all"


def test_fingerprint__differs_where_any_index_differs():
    full = space_of(SHAPES)
    keep = random_positions(full.size, 17, seed=1)
    seen = {full.fingerprint(), full.select(keep).fingerprint()}
    free = [i for i in range(full.size) if i not in keep.tolist()]
    for place in range(len(keep)):
        changed = keep.clone()
        changed[place] = free[place]
        seen.add(full.select(changed.sort().values).fingerprint())
    assert len(seen) == len(keep) + 2
    assert full.select(keep.clone()).fingerprint() in seen


def test_fingerprint__differs_by_name_shape_and_order_and_not_by_memory_layout():
    one = space_of([("a", (2, 3)), ("b", (6,))])
    others = [
        space_of([("a", (3, 2)), ("b", (6,))]),
        space_of([("a", (6,)), ("b", (6,))]),
        space_of([("b", (6,)), ("a", (2, 3))]),
        space_of([("a", (2, 3)), ("c", (6,))]),
        space_of([("a", (2, 3))]),
    ]
    assert len({one.fingerprint(), *(other.fingerprint() for other in others)}) == 6
    assert all(one != other for other in others) and one != "a"
    strided = torch.arange(8)[::2]
    dense = ParameterSpace([("a", (9,), strided.contiguous())])
    assert dense == ParameterSpace([("a", (9,), strided)])
    assert hash(dense) == hash(ParameterSpace([("a", (9,), strided)]))


def test_positions_in__find_a_selection_again() -> None:
    """Also one of a space that was selected itself, with weights of which nothing is left."""
    whole = ParameterSpace([("a", (3, 5), None), ("b", (7,), None), ("c", (4,), None)])
    once = whole.select(torch.tensor([0, 2, 7, 14, 23, 24, 25]))
    keep = torch.tensor([1, 2, 4, 6])
    assert once.select(keep).positions_in(once).tolist() == keep.tolist()
    assert once.positions_in(whole).tolist() == [0, 2, 7, 14, 23, 24, 25]


def test_local__are_places_of_what_a_rank_has() -> None:
    part, vector = Slices(20, ((2, 5), (9, 9), (11, 16))), torch.arange(20)
    kept = torch.tensor([0, 2, 4, 9, 11, 15, 16, 19])
    assert part.take(vector)[part.local(kept)].tolist() == [2, 4, 11, 15]
