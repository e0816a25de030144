"""In place and back = a changed copy and an untouched original, bit for bit; files = memory; saved = what it says."""

from __future__ import annotations

import copy
import json

import pytest
import tiny
import torch
from safetensors.torch import load_file

from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.rewriting import move as rewriting
from gradiend_dist.rewriting.card import save_rewritten
from gradiend_dist.rewriting.move import InPlace, VectorsInFile, VectorsInMemory, direction
from gradiend_dist.rewriting.step import Step
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.layout import WEIGHTS


def model_of(family: str = "bert", keep: int | None = None, dtype=torch.float32, **options) -> ModelWithGradiend:
    tokenizer = tiny.wordpiece_tokenizer() if family == "bert" else tiny.byte_level_tokenizer()
    base = tiny.base_model(family, len(tokenizer)).to(dtype)
    space = ParameterSpace.of_model(base)
    if keep is not None:
        chosen = torch.randperm(space.size, generator=torch.Generator().manual_seed(3))[:keep].sort().values
        space = space.select(chosen)
    gradiend = ParamMappedGradiendModel(space, generator=torch.Generator().manual_seed(1), **options)
    return ModelWithGradiend(base, gradiend, tokenizer)


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [None, 1, 501])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_in_place__is_the_changed_copy_and_then_the_original(family, keep, dtype, monkeypatch):
    """In bfloat16 and at large steps, taking the step back by subtraction would not give the original."""
    monkeypatch.setattr(rewriting, "CHUNK", 77)  # pieces that end within weights
    model = model_of(family, keep, dtype)
    before = bits(model.base_model)
    with InPlace(model.base_model, model.gradiend.space.active(), VectorsInMemory(model.gradiend)) as moved:
        for rate, factor in ((50.0, 1.0), (0.003, -1.0), (7.0, 0.4)):
            moved.move(Step(rate, factor))
            now = bits(model.base_model)
            moved.restore()
            assert_same(now, bits(model.rewrite_base_model(rate, factor)))
            assert any(not torch.equal(now[name], tensor) for name, tensor in before.items())
        moved.move(Step(3.0))
    assert_same(before, bits(model.base_model))


def test_bfloat16__keeps_a_step_that_is_smaller_than_its_own():
    """Fails if sums are rounded to the nearest: next to nothing of this step would be left."""
    model = model_of("gpt2", None, torch.bfloat16)
    before, step = bits(model.base_model), Step(1e-3)
    changes = rewriting.changes(model.base_model, model.gradiend.space.active(), VectorsInMemory(model.gradiend), step)
    asked = torch.cat([change.double() for _, _, change in changes])
    after = bits(model.rewrite_base_model(step.learning_rate, step.feature_factor))
    names = [weight.name for weight in model.gradiend.space.active()]
    moved = torch.cat([(after[name].double() - before[name].double()).flatten() for name in names])
    assert (moved == 0.0).double().mean() > 0.9, "this step is not small"
    assert float(moved @ asked / (asked @ asked)) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("places", [slice(0, 301), torch.randperm(5000)[:301]], ids=["range", "selected"])
def test_bfloat16__is_rounded_by_the_place_alone(places):
    """So ranks with other shards, pieces of other sizes and one entry by itself give the same weights."""
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(301, generator=generator).bfloat16()
    change = torch.randn(301, generator=generator) * 1e-3
    offset = 2**40 + 17
    whole = rewriting.moved(entries, change, rewriting.Places(offset, places))
    listed = torch.arange(301) if isinstance(places, slice) else places
    for part in (slice(0, 1), slice(1, 100), slice(100, 301)):
        where = slice(part.start, part.stop) if isinstance(places, slice) else places[part]
        assert torch.equal(rewriting.moved(entries[part], change[part], rewriting.Places(offset, where)), whole[part])
    assert not torch.equal(rewriting.moved(entries, change, rewriting.Places(offset, listed.flip(0))), whole)


def test_in_place__is_itself_again_after_an_exception():
    model = model_of(keep=40)
    before = bits(model.base_model)
    with (
        pytest.raises(ZeroDivisionError),
        InPlace(model.base_model, model.gradiend.space.active(), VectorsInMemory(model.gradiend)) as moved,
    ):
        moved.move(Step(3.0))
        _ = 1 / 0
    assert_same(before, bits(model.base_model))


def test_in_place__holds_one_copy_of_what_it_touches():
    """Fails for a copy of the model, or of a weight of which one entry is touched."""
    model = model_of(keep=501)
    moved = InPlace(model.base_model, model.gradiend.space.active(), VectorsInMemory(model.gradiend))
    assert sum(original.numel() for original in moved._originals) == 501


@pytest.mark.parametrize("part", ["decoder", "encoder-weight", "decoder-weight", "decoder-bias", "decoder-sum"])
@pytest.mark.parametrize("latent_dim", [1, 3])
def test_vectors_in_file__are_those_in_memory(part, latent_dim, tmp_path):
    model = model_of(keep=333, latent_dim=latent_dim, activation_decoder="tanh")
    model.save_pretrained(tmp_path / "model")
    in_file = VectorsInFile(tmp_path / "model" / WEIGHTS, model.gradiend)
    for where in (slice(0, 333), slice(5, 6), slice(100, 297)):
        expected = direction(VectorsInMemory(model.gradiend), slice(0, 333), Step(1.0, 0.7, part))[where]
        torch.testing.assert_close(direction(in_file, where, Step(1.0, 0.7, part)), expected)


def test_directions__do_not_change_the_model():
    """A vector that is scaled where it lies would be another one at the next point."""
    model = model_of(keep=50)
    before = {name: tensor.clone() for name, tensor in model.gradiend.state_dict().items()}
    for part in ("decoder", "encoder-weight", "decoder-weight", "decoder-bias", "decoder-sum"):
        model.rewrite_base_model(0.3, 1.0, part)
    assert_same(before, dict(model.gradiend.state_dict()))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_saved__is_a_complete_model_and_what_was_not_moved_is_the_same_to_the_byte(dtype, tmp_path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = model_of(keep=300)
    model.base_model.save_pretrained(tmp_path / "base")
    changed = model.rewrite_base_model(0.5, 1.0, output_dir=tmp_path / "new", dtype=dtype, max_shard_size="4KB")
    shards = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(shards.values())) > 1
    found = {name: load_file(tmp_path / "new" / file)[name] for name, file in shards.items()}
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert found.keys() == base.keys()
    touched = {weight.name: weight.flat_indices() for weight in model.gradiend.space.active()}
    for name, tensor in base.items():
        same = torch.ones(tensor.numel(), dtype=torch.bool)
        same[touched.get(name, torch.tensor([], dtype=torch.int64))] = False
        expected = tensor if dtype is None else tensor.bfloat16()
        assert torch.equal(found[name].view(-1)[same], expected.reshape(-1)[same]), name
        if name in touched:
            assert not torch.equal(found[name].view(-1)[~same], expected.reshape(-1)[~same]), name
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert_same(bits(loaded), bits(changed))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "new")) == len(model.tokenizer)
    card = (tmp_path / "new" / "README.md").read_text()
    assert "300 of the" in card and "learning rate 0.5" in card and card.startswith("---\n")


def test_saved__nothing_else_is_replaced_and_nothing_is_left_half(tmp_path, monkeypatch):
    model = model_of(keep=30)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(UserError, match="holds other files than a rewritten model"):
        model.rewrite_base_model(0.5, output_dir=tmp_path / "mine")
    model.rewrite_base_model(0.5, output_dir=tmp_path / "new")
    before = (tmp_path / "new" / "README.md").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model.base_model), "save_pretrained", full)
    with pytest.raises(UserError, match="No space left on device"):
        model.rewrite_base_model(0.7, output_dir=tmp_path / "new")
    assert (tmp_path / "new" / "README.md").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "new"]


def test_dtype__that_is_none_is_told_before_any_work(monkeypatch):
    model = model_of(keep=5)
    monkeypatch.setattr(copy, "deepcopy", None)
    with pytest.raises(UserError, match="dtype='int8' is not known: choose one of float32"):
        model.rewrite_base_model(0.5, dtype="int8")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_step__of_no_finite_length_is_refused(value):
    with pytest.raises(UserError, match=f"learning_rate={value} is no finite number"):
        Step(value)
    with pytest.raises(UserError, match=f"feature_factor={value} is no finite number"):
        Step(0.1, (1.0, value))


def test_saved__a_model_with_a_number_that_is_not_finite_is_not(tmp_path):
    """Fails if a damaged run, or a step too large for the dtype, ends as a model that nobody can use."""
    model = tiny.base_model("bert", 40)
    list(model.parameters())[3].data.view(-1)[5] = float("inf")
    name = [name for name, _ in model.named_parameters()][3]
    with pytest.raises(UserError, match=f"{name.replace('.', '[.]')} that are not finite"):
        save_rewritten(model, tiny.wordpiece_tokenizer(), tmp_path / "out", "card")
    assert not list(tmp_path.iterdir())
