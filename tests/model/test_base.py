"""What is asked of a base model where it is loaded, and how its passes run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from gradiend_dist import TrainingArguments
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import Placement
from gradiend_dist.distributed.launch import Launch
from gradiend_dist.engines import spread as spreading
from gradiend_dist.engines.spread import Spread
from gradiend_dist.errors import UserError
from gradiend_dist.gradients.base import BaseGradients
from gradiend_dist.gradients.cloze import Cloze, ClozeBatch, ClozeRow, LogitsAt, choose_objective
from gradiend_dist.gradients.items import Item
from gradiend_dist.model.base import load_base_model
from gradiend_dist.model.recompute import recompute
from gradiend_dist.space import ParameterSpace

CPU = torch.device("cpu")


def saved(path: Path, family: str = "bert", **config: Any) -> Path:
    tokenizer = tiny.wordpiece_tokenizer() if family == "bert" else tiny.byte_level_tokenizer()
    tiny.base_model(family, len(tokenizer)).save_pretrained(path)  # type: ignore[operator]
    tokenizer.save_pretrained(str(path))
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, **config}))
    return path


def sharded_launch(**plugin: Any) -> Spread:
    """A launch under FSDP, of which nothing but its configuration is asked."""
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(transformer_cls_names_to_wrap=None, **plugin))
    launch = Launch("sliced", Comm(), SimpleNamespace(state=state), shards_base=True)
    return Spread(launch, Placement(CPU, CPU, CPU))


# --- what is refused


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("gptq", {"quant_method": "gptq", "bits": 4}),
        ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        ("load_in_8bit", {"load_in_8bit": True}),
        ("by an unknown method", {"bits": 4}),
    ],
)
def test_load__refuses_a_quantised_model_by_its_configuration(tmp_path, method, settings):
    """Fails if the weights are looked at first: each method fails there in its own way, some with a traceback."""
    path = saved(tmp_path / "model", quantization_config=settings)
    with pytest.raises(UserError, match=rf"is quantised \({method}\).*pass the model"):
        load_base_model(str(path))


def test_load__refuses_an_adapter_where_peft_is_not_installed(tmp_path, monkeypatch):
    """Fails if the adapter's directory is told to hold no config.json, which is no remedy."""
    monkeypatch.setattr("gradiend_dist.model.base.find_spec", lambda _name: None)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/model"}))
    with pytest.raises(UserError, match="adapter of PEFT and no model: install peft, or merge it"):
        load_base_model(str(tmp_path))


def test_load__merges_an_adapter(tmp_path):
    """Fails if the adapter is left out, or stays beside the weights under names of its own."""
    peft = pytest.importorskip("peft")
    path = saved(tmp_path / "model")
    model, _ = load_base_model(str(path))
    names = [name for name, _ in model.named_parameters()]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    merged, _ = load_base_model(str(tmp_path / "adapter"))
    expected = adapted.merge_and_unload()
    assert [name for name, _ in merged.named_parameters()] == names
    for (name, ours), theirs in zip(merged.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_load__takes_an_attention_and_names_one_that_does_not_exist(tmp_path):
    """Fails if attn_implementation is ignored, or an unknown one is a traceback."""
    path = str(saved(tmp_path / "model"))
    for name in ("eager", "sdpa"):
        model: Any = load_base_model(path, attn_implementation=name)[0]
        assert model.config._attn_implementation == name
    with pytest.raises(UserError, match="cannot be loaded: .*flash"):
        load_base_model(path, attn_implementation="flash_attention_9")


def test_load__puts_weights_on_the_device_at_once(tmp_path, monkeypatch):
    """Fails if a replicated base is whole on the host first: nobody may move it then."""
    monkeypatch.setattr(nn.Module, "to", lambda *_: pytest.fail("moved after it was loaded"))
    model, _ = load_base_model(str(saved(tmp_path / "model")), device=torch.device("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


# --- passes


def batch_of() -> ClozeBatch:
    return ClozeBatch.of([Cloze((3, 5, 4, 7), (2,), (6,)), Cloze((3, 6, 4, 7), (2,), (6,))], 0, CPU)


def test_passes__keep_no_keys_and_values_for_a_text_that_does_not_go_on():
    """Fails if use_cache is left to the configuration, where most causal models have it on."""
    model: Any = tiny.base_model("gpt2", 50)
    assert model.config.use_cache
    caches: list[Any] = []
    model.register_forward_hook(lambda _module, _args, output: caches.append(output.past_key_values))
    LogitsAt(model)(batch_of())
    assert caches and all(cache is None for cache in caches)


def test_check__does_not_take_a_full_memory_for_a_head_that_wants_all(monkeypatch):
    """Fails if OutOfMemoryError, a RuntimeError, chooses the way that needs more memory."""
    model = tiny.base_model("bert", 50)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LogitsAt, "_forward_narrow", full)
    with pytest.raises(torch.OutOfMemoryError):
        LogitsAt(model)(batch_of())


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_recompute__gives_the_same_gradients_from_two_passes_over_one_graph(family):
    """Fails if a layer is not computed again, or is not the same then; source and target share a forward pass."""
    tokenizer = tiny.wordpiece_tokenizer() if family == "bert" else tiny.byte_level_tokenizer()
    model = tiny.base_model(family, len(tokenizer))
    objective = choose_objective("auto", model, tokenizer, max_length=16, mask_placeholder="[MASK]", as_reference=False)
    rows = tuple(ClozeRow(Cloze((3, row, 4, 7), (2,), (6,)), Cloze((3, row, 4, 7), (2,), (8,))) for row in (5, 6))
    base = BaseGradients(model, tokenizer, objective, ParameterSpace.of_model(model))
    expected = base.compute(Item(rows), ["alternative", "diff"])
    calls: list[str] = []
    inner = {"bert": "layer.0.attention.self", "gpt2": "h.0.attn"}[family]
    watched = next(module for name, module in model.named_modules() if name.endswith(inner))
    watched.register_forward_hook(lambda *_: calls.append(inner))
    sharded_launch(activation_checkpointing=False).recompute_layers(model, asked=True)
    sharded_launch(activation_checkpointing=True).recompute_layers(model, asked=False)  # once is enough
    found = base.compute(Item(rows), ["alternative", "diff"])
    assert len(calls) == 3  # forward, and again in each backward pass
    for kind, vector in expected.items():
        assert torch.equal(found[kind], vector), kind


def test_recompute__is_asked_for_by_fsdp_configuration_as_well():
    """Fails if fsdp_activation_checkpointing is ignored."""
    for asked in (True, False):
        model = tiny.base_model("bert", 50)
        sharded_launch(activation_checkpointing=asked).recompute_layers(model, asked=False)
        assert any("forward" in vars(module) for module in model.modules()) is asked
    layer = nn.Sequential(nn.Embedding(3, 2))
    recompute([layer])
    assert "forward" not in vars(layer)  # its hooks count their calls


# --- what the launch says


def test_mixed_precision__of_the_launch_is_that_of_the_run(monkeypatch):
    """Fails if an Accelerate configuration's mixed_precision is ignored."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert TrainingArguments().bf16 and TrainingArguments(bf16=True).bf16
    with pytest.raises(UserError, match="fp16 is set and the launch has mixed_precision=bf16"):
        TrainingArguments(fp16=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UserError, match="mixed_precision=fp8"):
        TrainingArguments()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert not TrainingArguments().bf16


def test_spread__makes_the_base_models_gpu_the_current_one(monkeypatch):
    """Fails if events are recorded on GPU 0 where device=cuda:1 was asked for, or tf32 is ignored."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(spreading, "launched", lambda _timeout: Launch("placed", Comm()))
    try:
        Spread.of(TrainingArguments(device="cuda:1", tf32=True))
        assert chosen == [torch.device("cuda:1")]
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    finally:
        Spread.of(TrainingArguments(device="cpu"))
    assert not torch.backends.cuda.matmul.allow_tf32


def test_zero__refuses_what_cublas_cannot_count():
    """Fails if a weight of 2^31 entries is left to fail inside a matrix product; the other engines cut theirs."""
    limit = SimpleNamespace(size=2**31 - 1)
    deepspeed, cut = (Spread(Launch(engine, Comm()), Placement(CPU, CPU, CPU)) for engine in ("zero", "sliced"))
    deepspeed.require_trainable(limit, 1)
    cut.require_trainable(limit, 2)
    with pytest.raises(UserError, match="DeepSpeed cannot train .* 4,294,967,294 entries each.*multi_gpu.yaml"):
        deepspeed.require_trainable(limit, 2)
