"""Gradients of the frozen base model: equal to plain autograd however they are batched, selected, rounded or kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.errors import UserError
from gradiend_dist.gradients import base as gradients
from gradiend_dist.gradients import store
from gradiend_dist.gradients.base import AddToVectors, BaseGradients
from gradiend_dist.gradients.buckets import Buckets, Reduced
from gradiend_dist.gradients.cloze import CausalObjective, Cloze, ClozeRow, MaskedObjective, Objective
from gradiend_dist.gradients.items import Item, ItemRows
from gradiend_dist.gradients.store import GradientSource, GradientStore, store_directory
from gradiend_dist.space import ParameterSpace

KINDS = ["factual", "alternative", "diff"]

# Rows of different lengths; the same number of pieces in both words, different numbers, and an identity.
ROWS = [
    ("The man said [MASK] left .", "he", "she"),
    ("[MASK] was old", "she", "he"),
    ("the doctor and the nurse said that [MASK] was tired and left home early today .", "he", "it"),
]
MULTI_TOKEN_ROWS = [
    *ROWS,
    ("a woman said ( [MASK] ) today", "herself", "he"),
    ("old [MASK] .", "themselves", "herself"),
]


class Base:
    """A base model with its tokenizer and objective, and the plain gradient of its own loss."""

    def __init__(self, family: str, **options: Any) -> None:
        self.is_masked = family == "bert"
        self.tokenizer = tiny.wordpiece_tokenizer() if self.is_masked else tiny.byte_level_tokenizer()
        self.model = tiny.base_model(family, len(self.tokenizer), **options)
        self.objective: Objective = (
            MaskedObjective(self.tokenizer, 40, "[MASK]")
            if self.is_masked
            else CausalObjective(self.tokenizer, 40, "[MASK]", as_reference=False)
        )
        self.space = ParameterSpace.of_model(self.model)

    def gradients(self, space: ParameterSpace | None = None, **options: Any) -> BaseGradients:
        return BaseGradients(self.model, self.tokenizer, self.objective, space or self.space, **options)

    def item(self, rows: list[tuple[str, str, str]], **options: Any) -> Item:
        if not self.is_masked:
            rows = [("The man said. " + text, factual, alternative) for text, factual, alternative in rows]
        return Item(
            tuple(ClozeRow(*(self.objective.cloze(text, word) for word in words)) for text, *words in rows), **options
        )

    def plain(self, clozes: list[Cloze]) -> Tensor:
        """Autograd of Hugging Face's own loss, with its labels, over the whole backbone."""
        rows = []
        for cloze in clozes:
            labels = [-100] * len(cloze.input_ids)
            if self.is_masked:
                for position, label in zip(cloze.positions, cloze.labels, strict=True):
                    labels[position] = label
                rows.append((list(cloze.input_ids), labels))
            else:  # a causal loss shifts its labels: the wanted token itself is the next input
                rows.append(([*cloze.input_ids, *cloze.labels], [*labels, *cloze.labels]))
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        attention = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
        loss = self.model(input_ids=ids, attention_mask=attention, labels=labels).loss
        parameters = dict(self.model.named_parameters())
        found = torch.autograd.grad(loss, [parameters[weight.name] for weight in self.space.weights])
        return torch.cat([gradient.reshape(-1) for gradient in found])

    def plain_kinds(self, item: Item) -> dict[str, Tensor]:
        factual = self.plain([row.factual for row in item.rows])
        alternative = self.plain([row.alternative for row in item.rows])
        return {"factual": factual, "alternative": alternative, "diff": factual - alternative}


@pytest.fixture(scope="module")
def bert() -> Base:
    return Base("bert")


@pytest.fixture(scope="module")
def gpt2() -> Base:
    return Base("gpt2")


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Base:
    return request.getfixturevalue(request.param)


def assert_close(actual: Tensor, expected: Tensor, *, tolerance: float = 1e-5) -> None:
    """Relative to the largest entry: float32 sums in another order."""
    assert expected.abs().max() > 1e-3, "a test on zeros proves nothing"
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def some_positions(space: ParameterSpace, step: int) -> Tensor:
    return torch.arange(3, space.size, step)


@contextmanager
def counting(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Forward passes of a model and backward passes of any loss."""
    counts = {"forward": 0, "backward": 0}
    hook = model.register_forward_hook(lambda *_: counts.__setitem__("forward", counts["forward"] + 1))
    plain_backward = Tensor.backward

    def backward(*args: Any, **options: Any) -> None:
        counts["backward"] += 1
        plain_backward(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "backward", backward)
        yield counts
    hook.remove()


# --- equal to plain autograd


@pytest.mark.parametrize("rows", [ROWS, MULTI_TOKEN_ROWS, ROWS[:1]], ids=["one_piece", "several_pieces", "one_row"])
@pytest.mark.parametrize("base", ["bert", "gpt2"], indirect=True)
def test_compute__equals_autograd_of_the_models_own_loss(base, rows):
    """Fails by a wrong position, a wrong mean, padding that is attended to, a tied weight counted once or twice."""
    item = base.item(rows)
    computed = base.gradients().compute(item, KINDS)
    for kind, expected in base.plain_kinds(item).items():
        assert_close(computed[kind], expected)


class SumOfOne(Comm):
    """All there is of a sum over ranks is here."""

    def all_reduce(self, entries: Tensor) -> tuple[Tensor, Any]:
        return entries, SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("tie", [True, False])
def test_compute__equals_autograd_with_tied_and_untied_heads(family, tie):
    """In buckets too, each of which is sent when all that its weights get has come: Gemma's embedding scales what it
    looks up, so that autograd forms its part and a hook that of the head."""
    base = Base(family, tie_word_embeddings=tie)
    item, gradients = base.item(ROWS), base.gradients()
    buckets = Buckets(base.space, gradients.slices_by_rank, SumOfOne(), size=1000)
    for kind, expected in base.plain_kinds(item).items():
        assert_close(gradients.compute(item, [kind])[kind], expected)
        vectors = {kind: gradients.empty()}
        reduced = Reduced(buckets, AddToVectors([vectors]), gradients.device)
        gradients._run_passes([item.rows], item, [kind], reduced)
        assert_close(vectors[kind], expected)


@pytest.mark.parametrize("kinds", [["diff"], ["diff", "factual"], ["alternative"], ["alternative", "diff"], KINDS])
@pytest.mark.parametrize("rows", [ROWS, MULTI_TOKEN_ROWS])
def test_compute__any_choice_of_kinds_gives_the_same(bert, kinds, rows):
    item = bert.item(rows)
    computed = bert.gradients().compute(item, kinds)
    expected = bert.plain_kinds(item)
    assert list(computed) == kinds
    for kind in kinds:
        assert_close(computed[kind], expected[kind])


@pytest.mark.parametrize(
    ("rows", "kinds", "forward", "backward"),
    [
        (ROWS, ["diff"], 1, 1),
        (ROWS, ["alternative", "diff"], 1, 2),
        (ROWS, ["factual"], 1, 1),
        (MULTI_TOKEN_ROWS, ["diff"], 2, 2),
        (MULTI_TOKEN_ROWS, ["alternative", "diff"], 2, 2),
        (MULTI_TOKEN_ROWS, ["alternative"], 1, 1),
    ],
)
def test_compute__takes_no_more_passes_than_it_must(bert, rows, kinds, forward, backward, monkeypatch):
    """Fails if factual and alternative no longer share a forward pass, or diff takes two backward passes."""
    base = bert.gradients()
    base.compute(bert.item(ROWS), ["factual"])  # the comparison of LogitsAt is made once
    with counting(bert.model, monkeypatch) as counts:
        base.compute(bert.item(rows), kinds)
    assert counts == {"forward": forward, "backward": backward}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("per_row_mean", [False, True])
@pytest.mark.parametrize("base", ["bert", "gpt2"], indirect=True)
def test_compute__micro_batches_of_any_size_are_the_whole_batch(base, size, per_row_mean):
    """Fails if a micro-batch's mean replaces the item's: rows with more pieces would count less."""
    item = base.item(MULTI_TOKEN_ROWS, per_row_mean=per_row_mean)
    whole = base.gradients().compute(item, KINDS)
    parts = base.gradients(micro_batch_size=size).compute(item, KINDS)
    for kind in KINDS:
        assert_close(parts[kind], whole[kind])


@pytest.mark.parametrize("base", ["bert", "gpt2"], indirect=True)
def test_compute__per_row_mean_is_the_mean_of_rows_alone(base):
    """Fails if padding matters, or if a row of three pieces counts three times."""
    rows = MULTI_TOKEN_ROWS
    together = base.gradients().compute(base.item(rows, per_row_mean=True), KINDS)
    alone = [base.gradients().compute(base.item([row]), KINDS) for row in rows]
    for kind in KINDS:
        assert_close(together[kind], torch.stack([vectors[kind] for vectors in alone]).mean(0))
    if base.is_masked:
        mean_over_places = base.gradients().compute(base.item(rows), ["factual"])["factual"]
        assert not torch.allclose(mean_over_places, together["factual"], atol=1e-3)


@pytest.mark.parametrize("base", ["bert", "gpt2"], indirect=True)
def test_compute__the_tokenizers_padding_side_and_token_do_not_matter(base):
    expected = base.gradients().compute(base.item(MULTI_TOKEN_ROWS), ["diff"])["diff"]
    other = Base("bert" if base.is_masked else "gpt2")
    for side in ("left", "right"):
        for pad_token in ("he", ","):
            other.tokenizer.padding_side, other.tokenizer.pad_token = side, pad_token
            calculator = other.gradients()
            assert calculator.pad_id == other.tokenizer.convert_tokens_to_ids(pad_token) != base.gradients().pad_id
            assert_close(calculator.compute(other.item(MULTI_TOKEN_ROWS), ["diff"])["diff"], expected)


def test_compute__works_without_a_pad_token():
    base = Base("gpt2")
    assert base.tokenizer.pad_token_id is None
    assert base.gradients().pad_id == base.tokenizer.eos_token_id == 0


# --- a part of the space


@pytest.mark.parametrize("step", [1, 7, 101, 1777])
@pytest.mark.parametrize("base", ["bert", "gpt2"], indirect=True)
def test_compute__over_a_pruned_space_is_the_full_gradient_indexed(base, step):
    """Exactly: the same numbers are copied. Fails if an entry goes to a wrong place."""
    item = base.item(ROWS)
    keep = some_positions(base.space, step)
    full = base.gradients().compute(item, KINDS)
    pruned = base.gradients(base.space.select(keep)).compute(item, KINDS)
    for kind in KINDS:
        assert pruned[kind].shape == keep.shape
        assert_close(pruned[kind], full[kind][keep], tolerance=1e-6)


@pytest.mark.parametrize("kept", ["a layer", "a few entries of it", "a pattern"])
def test_compute__differentiates_nothing_below_the_lowest_selected_weight(bert, kept):
    """Fails if every weight wants a gradient, or if hidden states below the top layer carry a graph."""
    top = [w for w in bert.space.weights if w.name.startswith("bert.encoder.layer.1.")]
    start, stop = top[0].offset, top[-1].stop
    if kept == "a pattern":
        space = ParameterSpace.of_model(bert.model, ["bert.encoder.layer.1.*"])
    else:
        space = bert.space.select(torch.arange(start, stop, 1 if kept == "a layer" else 500))
    seen: dict[str, bool] = {}
    wanted: list[str] = []
    backbone = bert.model.bert

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).requires_grad
            wanted[:] = [n for n, p in bert.model.named_parameters() if p.requires_grad]

        return hook

    hooks = [
        backbone.embeddings.register_forward_hook(note("embeddings")),
        backbone.encoder.layer[0].register_forward_hook(note("layer 0")),
        backbone.encoder.layer[1].register_forward_hook(note("layer 1")),
    ]
    bert.gradients(space).compute(bert.item(ROWS), ["diff"])
    for hook in hooks:
        hook.remove()
    assert seen == {"embeddings": False, "layer 0": False, "layer 1": True}
    assert wanted == [weight.name for weight in space.active()]


@pytest.mark.parametrize("fails", [False, True])
def test_compute__leaves_the_base_model_as_it_was(fails):
    """Also after an error: a model that is used elsewhere must not keep our flags, hooks or gradients."""
    base = Base("bert")
    parameters = dict(base.model.named_parameters())
    for number, parameter in enumerate(parameters.values()):
        parameter.requires_grad_(number % 3 == 0)
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    calculator = base.gradients(base.space.select(some_positions(base.space, 19)))
    if fails:
        item = base.item(ROWS)
        broken = Item((*item.rows, ClozeRow(Cloze((6, 7), (0,), (10**6,)), Cloze((6, 7), (0,), (3,)))))
        with pytest.raises((IndexError, RuntimeError)):
            calculator.compute(broken, KINDS)
    else:
        calculator.compute(base.item(ROWS), KINDS)
    assert {name: parameter.requires_grad for name, parameter in parameters.items()} == flags
    assert all(parameter.grad is None for parameter in parameters.values())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in parameters.values())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in parameters.items())


def test_compute__does_not_mix_with_gradients_that_a_user_left():
    """Fails if a `.grad` from before is added to the first gradient, or is thrown away."""
    base = Base("bert")
    item = base.item(ROWS)
    expected = base.gradients().compute(item, ["diff"])["diff"]
    for parameter in base.model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    assert torch.equal(base.gradients().compute(item, ["diff"])["diff"], expected)
    assert all(bool((parameter.grad == 7.0).all()) for parameter in base.model.parameters())


def test_compute__works_inside_no_grad_and_on_a_frozen_model(bert):
    item = bert.item(ROWS)
    expected = bert.gradients().compute(item, ["diff"])["diff"]
    frozen = Base("bert")
    frozen.model.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(frozen.gradients().compute(item, ["diff"])["diff"], expected)


# --- identities


def test_compute__an_identity_has_a_diff_of_zeros_without_a_pass(bert, monkeypatch):
    item = bert.item([("The man said [MASK]", "he", "he"), ("[MASK] left", "herself", "herself")])
    with counting(bert.model, monkeypatch) as counts:
        diff = bert.gradients().compute(item, ["diff"], out={"diff": torch.full((bert.space.size,), 3.0)})["diff"]
    assert counts == {"forward": 0, "backward": 0} and not diff.any()


@pytest.mark.parametrize("size", [None, 1, 2])
def test_compute__an_identity_among_other_rows_counts_in_the_mean(bert, size):
    item = bert.item([*ROWS[:2], ("The man said [MASK]", "they", "they"), ROWS[2]])
    computed = bert.gradients(micro_batch_size=size).compute(item, KINDS)
    for kind, expected in bert.plain_kinds(item).items():
        assert_close(computed[kind], expected)


# --- lower precision


@tiny.without_onednn()
def test_compute__bfloat16_is_close_to_float32_and_not_equal(bert):
    item = bert.item(MULTI_TOKEN_ROWS)
    exact = bert.gradients().compute(item, KINDS)
    rounded = bert.gradients(autocast=torch.bfloat16).compute(item, KINDS)
    for kind in KINDS:
        assert rounded[kind].dtype == torch.float32
        assert not torch.equal(rounded[kind], exact[kind]), "autocast had no effect"
        assert (rounded[kind] - exact[kind]).norm() < 0.05 * exact[kind].norm()


@tiny.without_onednn()
def test_compute__a_bfloat16_model_gives_float32_vectors(bert):
    half = Base("bert")
    half.model.to(torch.bfloat16)
    item = bert.item(ROWS)
    exact, rounded = (b.gradients().compute(item, ["diff"])["diff"] for b in (bert, half))
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 0.05 * exact.norm()


@tiny.without_onednn()
@pytest.mark.parametrize("scale", [2.0**14, 2.0**40])
def test_compute__float16_halves_its_scale_until_the_gradient_is_finite(bert, scale, monkeypatch, caplog):
    """At 2^40 every activation gradient overflows: infinities must neither be returned nor added to the next try."""
    monkeypatch.setattr(gradients, "FP16_SCALE", scale)
    item = bert.item(MULTI_TOKEN_ROWS)
    exact = bert.gradients().compute(item, KINDS)
    calculator = bert.gradients(autocast=torch.float16)
    with caplog.at_level(logging.INFO):
        rounded = calculator.compute(item, KINDS)
    for kind in KINDS:
        assert (rounded[kind] - exact[kind]).norm() < 0.02 * exact[kind].norm()
    assert ("loss scale is now" in caplog.text) == (scale > 2.0**20)
    found = calculator._scale
    assert found == scale if scale == 2.0**14 else 1.0 < found < scale
    calculator.compute(item, KINDS)
    assert calculator._scale == found, "the scale that works is kept"


@tiny.without_onednn()
def test_compute__float16_gives_up_on_a_gradient_that_is_never_finite():
    """Fails by not ending. The trainer then names the item."""
    base = Base("bert")
    with torch.no_grad():
        base.model.bert.embeddings.word_embeddings.weight[6, 0] = float("inf")
    vector = base.gradients(autocast=torch.float16).compute(base.item(ROWS), ["diff"])["diff"]
    assert not vector.isfinite().all()


# --- kept in memory


def source_of(base: Base, budget: int, directory: Path | None = None) -> GradientSource:
    return GradientSource(base.gradients(), GradientStore(budget, directory))


def test_source__computes_once_what_it_keeps(bert, monkeypatch):
    source = source_of(bert, 10**9)
    item, kinds = bert.item(ROWS), ["alternative", "diff"]
    first = {kind: vector.clone() for kind, vector in source.get(item, kinds, keep=True).items()}
    with counting(bert.model, monkeypatch) as counts:
        # An equal item, built anew: what it is counts, not which object it is or how it is called.
        second = source.get(bert.item(ROWS, name="another name"), kinds, keep=True)
    assert counts == {"forward": 0, "backward": 0}
    assert all(torch.equal(first[kind], second[kind]) for kind in kinds)
    assert (source.store.hits, source.store.misses) == (1, 1)
    assert source.store.used_bytes == 2 * 4 * bert.space.size


def test_source__tells_items_apart(bert):
    items = [
        bert.item(ROWS),
        bert.item(ROWS[:2]),
        bert.item(ROWS[::-1]),
        bert.item(ROWS, per_row_mean=True),
        bert.item([(text, alternative, factual) for text, factual, alternative in ROWS]),
    ]
    assert len({item.key for item in items}) == len(items)
    source = source_of(bert, 10**9)
    for item in items:
        source.get(item, ["diff"], keep=True)
    assert (source.store.hits, source.store.misses) == (0, len(items))


def test_source__computes_only_the_kinds_that_are_missing(bert, monkeypatch):
    source = source_of(bert, 10**9)
    item = bert.item(ROWS)
    kept = source.get(item, ["diff"], keep=True)["diff"]
    with counting(bert.model, monkeypatch) as counts:
        both = source.get(item, ["diff", "factual", "diff"], keep=True)
    assert counts == {"forward": 1, "backward": 1}
    assert both["diff"].data_ptr() == kept.data_ptr()
    assert_close(both["factual"], bert.plain_kinds(item)["factual"])
    assert (source.store.hits, source.store.misses) == (0, 2)


@pytest.mark.parametrize("room_for", [0, 1, 2, 3, 4])
def test_source__respects_its_budget_and_first_come_are_kept(bert, room_for):
    """Fails if one byte too much is used, or an item that was kept is thrown out for a later one."""
    size = 4 * bert.space.size
    source = source_of(bert, (room_for + 1) * size - 1)
    items = [bert.item([row]) for row in MULTI_TOKEN_ROWS]
    expected = [bert.gradients().compute(item, ["diff"])["diff"] for item in items]
    for _ in range(2):
        for item, vector in zip(items, expected, strict=True):
            assert torch.equal(source.get(item, ["diff"], keep=True)["diff"], vector)
            assert source.store.used_bytes <= source.store.budget_bytes
    assert source.store.used_bytes == room_for * size
    assert (source.store.hits, source.store.misses) == (room_for, 2 * len(items) - room_for)
    assert [source.store.get(item.key, "diff") is not None for item in items] == [i < room_for for i in range(5)]


def test_source__kept_vectors_are_never_overwritten_and_others_are_reused(bert):
    source = source_of(bert, 10**9)
    items = [bert.item([row]) for row in ROWS]
    kept = source.get(items[0], ["diff"], keep=True)["diff"]
    before = kept.clone()
    second = source.get(items[1], ["diff"], keep=False)["diff"]
    third = source.get(items[2], ["diff"], keep=False)["diff"]
    assert third.data_ptr() == second.data_ptr(), "what is not kept costs no new memory"
    source.get(items[2], ["factual", "diff"], keep=True)
    source.get(items[1], KINDS, keep=False)
    assert torch.equal(kept, before)
    assert torch.equal(source.get(items[0], ["diff"], keep=False)["diff"], before)
    assert source.store.get(items[1].key, "diff") is None


# --- kept on disk


def file_of(directory: Path) -> Path:
    (path,) = directory.glob("diff_*.safetensors")
    return path


def test_disk__another_instance_reads_the_same_bytes(bert, tmp_path, monkeypatch):
    item = bert.item(MULTI_TOKEN_ROWS)
    first = source_of(bert, 0, tmp_path).get(item, ["diff"], keep=True)["diff"].clone()
    assert torch.equal(load_file(file_of(tmp_path))["gradient"], first)
    other = source_of(Base("bert"), 10**9, tmp_path)
    with counting(other.base.model, monkeypatch) as counts:
        second = other.get(item, ["diff"], keep=True)["diff"]
        third = other.get(item, ["diff"], keep=True)["diff"]
    assert counts == {"forward": 0, "backward": 0} and torch.equal(first, second)
    assert third.data_ptr() == second.data_ptr(), "read once, then remembered"
    assert [path.name for path in tmp_path.iterdir()] == [file_of(tmp_path).name], "nothing is left behind"


def test_disk__a_file_is_read_and_hashed_once_for_each_use(bert, tmp_path, monkeypatch):
    """Fails if asking whether a gradient is there reads it: that costs more than the gradient of a small model."""
    items = [bert.item([row]) for row in ROWS]
    first = source_of(bert, 0, tmp_path)
    expected = [first.get(item, ["diff"], keep=True)["diff"].clone() for item in items]
    hashed: list[int] = []
    original = store.checksum
    monkeypatch.setattr(store, "checksum", lambda vector: hashed.append(len(vector)) or original(vector))
    again = source_of(bert, 0, tmp_path)
    assert all(again.has(item, ["diff"]) for item in items) and hashed == []
    for item, vector in zip(items, expected, strict=True):
        assert torch.equal(again.get(item, ["diff"], keep=True)["diff"], vector)
    assert len(hashed) == len(items)


def test_disk__everything_is_written_for_the_next_run(bert, tmp_path):
    """Also what this run does not visit again, and into a directory that does not exist yet."""
    directory = tmp_path / "root" / "store"
    source = source_of(bert, 0, directory)
    items = [bert.item([row]) for row in ROWS]
    first = [source.get(item, ["diff"], keep=False)["diff"] for item in items]
    again = source_of(bert, 0, directory)
    assert all(torch.equal(again.get(item, ["diff"], keep=False)["diff"], first[i]) for i, item in enumerate(items))
    assert (again.store.hits, again.store.misses) == (3, 0)


def test_disk__a_forbidden_directory_is_told_in_one_sentence(bert, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        source_of(bert, 0, tmp_path / "file").get(bert.item(ROWS), ["diff"], keep=True)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-5],
    "truncated in the header": lambda data: data[:11],
    "empty": lambda _: b"",
    "grown": lambda data: data + b"\0\0\0\0",
    **{
        f"byte at {share:.0%}": (
            lambda data, share=share: (
                data[: int(share * len(data))]
                + bytes([data[int(share * len(data))] ^ 4])
                + data[int(share * len(data)) + 1 :]
            )
        )
        for share in (0.0, 0.002, 0.01, 0.5, 0.9999)
    },
    "other checksum": lambda data: data.replace(b'"sha256":"', b'"sha256":"0'[:-1] + b'"', 1)[: len(data)],
    "no checksum": lambda data: data.replace(b'"sha256"', b'"sha255"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_disk__a_damaged_file_is_computed_again_and_repaired(bert, tmp_path, damage, caplog):
    item = bert.item(ROWS)
    expected = source_of(bert, 0, tmp_path).get(item, ["diff"], keep=True)["diff"].clone()
    path = file_of(tmp_path)
    data = path.read_bytes()
    damaged = DAMAGE[damage](data)
    assert damaged != data
    path.write_bytes(damaged)
    source = source_of(bert, 0, tmp_path)
    assert torch.equal(source.get(item, ["diff"], keep=True)["diff"], expected)
    assert source.store.misses == 1 and "computed again" in caplog.text
    assert path.read_bytes() == data


def test_store_directory__is_another_one_for_all_that_a_gradient_depends_on(tmp_path):
    """Fails if a gradient of another model, tokenizer, selection or precision could be taken for this one."""

    def directory(base: Base, space: ParameterSpace | None = None, tokenizer: Any = None, **options: Any) -> Path:
        calculator = base.gradients(space, **options)
        return store_directory(tmp_path, base.model, tokenizer or base.tokenizer, calculator.space, calculator)

    base = Base("bert")
    changed = Base("bert")
    with torch.no_grad():
        changed.model.bert.encoder.layer[0].output.dense.bias[3] += 1e-6
    other_head = Base("bert")
    with torch.no_grad():
        other_head.model.cls.predictions.bias[0] += 1.0
    half = Base("bert")
    half.model.to(torch.bfloat16)
    other_tokenizer = tiny.wordpiece_tokenizer()
    other_tokenizer.add_tokens(["zebra"])
    keep = some_positions(base.space, 7)
    moved = keep.clone()
    moved[5] += 1
    early, following = Base("gpt2"), Base("gpt2")
    found = [
        directory(base),
        directory(changed),
        directory(other_head),
        directory(Base("bert", num_attention_heads=3)),
        directory(Base("bert", hidden_act="relu")),
        directory(Base("bert", layer_norm_eps=1e-3)),
        directory(half),
        directory(base, tokenizer=other_tokenizer),
        directory(base, base.space.select(keep)),
        directory(base, base.space.select(moved)),
        directory(base, autocast=torch.bfloat16),
        directory(early),
    ]
    assert len(set(found)) == len(found)
    assert directory(Base("bert")) == found[0] and directory(following) == found[-1]
    base.model.config._name_or_path = "elsewhere"
    assert directory(base) == found[0], "where a model is stored does not matter"


def test_disk__another_model_does_not_find_the_gradients_of_the_first(tmp_path):
    first, second = Base("bert"), Base("bert", seed=1)
    item = first.item(ROWS)
    found = []
    for base in (first, second, first):
        calculator = base.gradients()
        store = GradientStore(0, store_directory(tmp_path, base.model, base.tokenizer, base.space, calculator))
        source = GradientSource(calculator, store)
        assert_close(source.get(item, ["diff"], keep=True)["diff"], base.plain_kinds(item)["diff"])
        found.append(store.hits)
    assert found == [0, 0, 1]


# --- rows of a table


def test_item_rows__tokenize_a_row_when_it_is_first_wanted(bert):
    table = pd.DataFrame(
        [
            {"masked": t, "factual": f, "alternative": a, "transition": "x→y", "label": 1.0}
            for t, f, a in MULTI_TOKEN_ROWS
        ]
    )
    asked: list[str] = []

    class Asked(MaskedObjective):
        def cloze(self, template: str, word: str) -> Cloze:
            asked.append(word)
            return super().cloze(template, word)

    rows = ItemRows(table, Asked(bert.tokenizer, 40, "[MASK]"))
    assert len(rows) == 5 and not asked
    item = rows.item([3, 0])
    rows.item([0, 3])
    assert asked == ["herself", "he", "he", "she"]
    assert item.rows == bert.item([MULTI_TOKEN_ROWS[3], MULTI_TOKEN_ROWS[0]]).rows
    assert item.name == "x→y, rows 3, 0" and not item.per_row_mean
    assert rows.item([1], per_row_mean=True).per_row_mean
