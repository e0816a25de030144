"""A delta = the rewritten model without the model: applied at strength 1 the same bits, and taken back to the bit."""

from __future__ import annotations

import copy
import json
import struct

import pytest
import tiny
import torch
from safetensors.torch import load_file

from gradiend_dist import load_delta
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.model_with_gradiend import ModelWithGradiend
from gradiend_dist.rewriting import move
from gradiend_dist.rewriting.delta import Delta, save_delta
from gradiend_dist.rewriting.move import ByTensor, VectorsInMemory
from gradiend_dist.rewriting.step import Step
from gradiend_dist.space import ParameterSpace


def model_of(keep: int | None, dtype: torch.dtype = torch.float32) -> ModelWithGradiend:
    tokenizer = tiny.wordpiece_tokenizer()
    base = tiny.base_model("bert", len(tokenizer)).to(dtype)
    space = ParameterSpace.of_model(base)
    if keep is not None:
        chosen = torch.randperm(space.size, generator=torch.Generator().manual_seed(3))[:keep].sort().values
        space = space.select(chosen)
    gradiend = ParamMappedGradiendModel(space, generator=torch.Generator().manual_seed(1))
    return ModelWithGradiend(base, gradiend, tokenizer)


def delta_of(model: ModelWithGradiend, step: Step, path) -> Delta:
    weights, vectors = model.gradiend.space.active(), VectorsInMemory(model.gradiend)
    scaling = ByTensor() if step.scaling == "tensor" else None
    return load_delta(save_delta(path, model.base_model, weights, vectors, model.change(step), scaling))


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor, two[name])]


@pytest.mark.parametrize("scaling", ["plain", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [None, 501])
def test_delta__is_the_rewritten_model_and_is_taken_back_to_the_bit(keep, dtype, scaling, tmp_path, monkeypatch):
    monkeypatch.setattr(move, "CHUNK", 77)  # pieces that end within weights
    model = model_of(keep, dtype)
    before = bits(model.base_model)
    delta = delta_of(model, Step(0.3, -1.0, scaling=scaling), tmp_path / "delta")
    assert not differing(before, bits(model.base_model)), "writing changes nothing"
    wanted = bits(model.rewrite_base_model(0.3, -1.0, scaling=scaling))
    with delta.applied(model.base_model) as changed:
        assert changed is model.base_model and not differing(wanted, bits(changed))
    assert not differing(before, bits(model.base_model))
    with pytest.raises(ZeroDivisionError), delta.applied(model.base_model, 40.0):
        assert differing(wanted, bits(model.base_model))
        (delta.path / "delta.safetensors").rename(tmp_path / "elsewhere")
        _ = 1 / 0
    assert not differing(before, bits(model.base_model)), "also without its file"
    (tmp_path / "elsewhere").rename(delta.path / "delta.safetensors")
    assert not differing(wanted, bits(delta.apply(model.base_model)))


def test_strength__goes_with_the_change(tmp_path):
    model = model_of(None)
    delta = delta_of(model, Step(0.3), tmp_path / "delta")
    before, whole = bits(model.base_model), bits(delta.apply(copy.deepcopy(model.base_model)))
    for strength in (0.0, 0.5, -1.0):
        found = bits(delta.apply(copy.deepcopy(model.base_model), strength))
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, before[name] + strength * (whole[name] - before[name]))


def test_pruned_delta__is_small(tmp_path):
    model = model_of(40)
    delta = delta_of(model, Step(0.3), tmp_path / "delta")
    tensors = load_file(delta.path / "delta.safetensors")
    assert sum(tensor.numel() for name, tensor in tensors.items() if name.startswith("values.")) == 40
    assert (delta.path / "delta.safetensors").stat().st_size < 10_000


def test_other_model__is_refused(tmp_path):
    delta = delta_of(model_of(40), Step(0.3), tmp_path / "delta")
    other = tiny.base_model("gpt2", 300)
    with pytest.raises(UserError, match="no such weight"):
        delta.apply(other)
    with pytest.raises(UserError, match="strength=nan is not finite"):
        delta.apply(model_of(40).base_model, float("nan"))


def damaged(path, how: str) -> None:
    facts, weights = path / "delta.json", path / "delta.safetensors"
    if how == "no facts":
        facts.unlink()
    elif how == "no json":
        facts.write_text("{")
    elif how == "other json":
        facts.write_text("[1]")
    elif how == "no shapes":
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "shapes": 3}))
    elif how == "other shapes":
        shapes = json.loads(facts.read_text())["shapes"]
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "shapes": {name: [1] for name in shapes}}))
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-40])
    elif how == "no header":
        weights.write_bytes(struct.pack("<Q", 2**40) + b"x" * 100)


@pytest.mark.parametrize(
    "how", ["no facts", "no json", "other json", "no shapes", "other shapes", "truncated", "no header"]
)
def test_damaged_delta__is_one_line(how, tmp_path):
    path = delta_of(model_of(40), Step(0.3), tmp_path / "delta").path
    damaged(path, how)
    with pytest.raises(UserError):
        load_delta(path)


def test_delta_that_is_not_finite__is_not_written(tmp_path):
    model = model_of(40)
    with torch.no_grad():
        model.gradiend.decoder_weight[3] = float("inf")
    with pytest.raises(UserError, match="not finite"):
        delta_of(model, Step(0.3), tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
