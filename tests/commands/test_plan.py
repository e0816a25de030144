"""The forecast: formulas against the bytes of the real objects, the command, and its errors."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaConfig

from gradiend_dist import PrePruneConfig, TrainingArguments, UserError
from gradiend_dist.__main__ import main
from gradiend_dist.commands.plan import Forecast, check_memory, needs_of
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.devices import place
from gradiend_dist.engines.base import StepOptions
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.forecast import base_of, run_of
from gradiend_dist.gradients.buckets import Buckets
from gradiend_dist.memory import (
    DEEPSPEED_BUCKET,
    DEEPSPEED_MAX_LIVE,
    Head,
    Need,
    all_gather,
    all_reduce,
    bucket_sizes,
    fsdp_slice,
    need_fsdp,
    need_offloaded,
    need_placed,
    need_sliced,
    need_zero,
    on_cpu,
    sliced,
    zero,
)
from gradiend_dist.memory import Run as PlannedRun
from gradiend_dist.model.base import skeleton_of
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.space import ParameterSpace, Slices

OPTIONS = StepOptions("adamw", 1e-2, (0.9, 0.999), 1e-8, max_grad_norm=0.0, supervised=None)
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 171,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1003,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "some_name.json"
    path.write_text(json.dumps(LLAMA))
    return path


def llama_base(**changes):
    skeleton = skeleton_of(LlamaConfig(**{**LLAMA, **changes}), "llama", None)
    return base_of(skeleton, ParameterSpace.of_model(skeleton), 2)


def planned(base, topk=1.0, **head):
    return PlannedRun(base, Head(max(1, int(base.n * topk)), **head), rows=8, tokens=16)


# --- formulas against the real thing


@pytest.mark.parametrize(("latent_dim", "bias"), [(1, True), (1, False), (3, True)])
@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_sliced__counts_the_bytes_of_the_engine_that_has_most(latent_dim, bias, world_size):
    space = ParameterSpace([("w", (101, 3), None), ("b", (8,), None)])
    found = []
    for rank in range(world_size):
        part = Slices.even(space.size, rank, world_size)
        model = ParamMappedGradiendModel(space, latent_dim, slices=part, bias_decoder=bias, initialize=False)
        engine = SlicedEngine(model, OPTIONS)
        state = engine.state()
        assert state is not None
        by_kind = {"weight": 0, "moment": 0}
        for name, tensor in state.cut.items():
            by_kind["weight" if name.endswith("weight") else "moment"] += tensor.numel() * tensor.element_size()
        found.append((by_kind["weight"], by_kind["moment"]))
    need = sliced(Head(space.size, latent_dim, bias), -(-space.size // world_size))
    assert max(found) == (need.weights, need.moments)


def test_bucket_sizes__are_those_of_the_reduction():
    shapes = [(7, 5), (3,), (40, 2), (11,), (1,), (90,), (2, 2)]
    space = ParameterSpace([(f"w{i}", shape, None) for i, shape in enumerate(shapes)])
    for size in (1, 30, 90, 10_000):
        cut = Buckets(space, [Slices.whole(space.size)], Comm(), size=size)
        sizes = [weight.numel for weight in space.weights]
        assert bucket_sizes(sizes, size) == [bucket.size for bucket in cut.buckets]


def test_base_of__counts_the_weights_of_the_real_model():
    model = tiny.base_model("llama", 57)
    base = base_of(model, ParameterSpace.of_model(model), 4)
    assert base.total == sum(p.numel() for p in model.parameters())
    assert base.n == ParameterSpace.of_model(model).size
    layer = model.model.layers[0]
    assert base.layer_sizes == (sum(p.numel() for p in layer.parameters()),) * 2
    assert (base.hidden, base.layers, base.vocabulary) == (12, 2, 57)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_fsdp_slice__is_what_rank_0_gets_of_every_weight(world_size):
    base = llama_base()
    skeleton = skeleton_of(LlamaConfig(**LLAMA), "llama", None)
    weights = ParameterSpace.of_model(skeleton).weights
    parts = [torch.empty(w.shape, device="meta").chunk(world_size)[0].numel() for w in weights]
    assert fsdp_slice(base, world_size) == sum(parts)


def test_zero__is_what_was_measured():
    """Bytes per weight of n, measured on 2 and 4 gloo ranks with n = 3e6 and 1e7, in both regimes of the bucket."""
    n = 10_000_000
    measured = {("zero1", 2): 62.1, ("zero2", 2): 62.1, ("zero3", 2): 78.1, ("zero1", 4): 53.6, ("zero3", 4): 63.6}
    for (engine, ranks), per_weight in measured.items():
        assert on_cpu(engine, n, ranks) / n == pytest.approx(per_weight, rel=0.02), engine
    large = DEEPSPEED_MAX_LIVE
    for stage, ranks, per_weight in ((1, 2, 59.3), (2, 2, 59.3), (3, 2, 58.7), (3, 4, 43.7)):
        assert zero(Head(large), stage, ranks, on_gpu=False).peak / large == pytest.approx(per_weight, rel=0.03)


def test_placed__needs_what_was_forecast_and_no_more_in_a_real_process():
    """Fails if a step holds anything of size n beside weights, moments, x and y: also what malloc cannot use again."""
    path = Path(__file__).parents[2] / "benchmarks" / "engines.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_engines", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    n = 6_000_000
    (found,) = benchmark.launch("placed", n, seconds=0.1)
    peak = max(found["peak_building"], found["peak_stepping"])
    print(f"peak {peak / n:.2f} bytes per weight, forecast {on_cpu('placed', n, 1) / n:.2f}")
    assert on_cpu("placed", n, 1) == pytest.approx(peak, rel=0.1)


def test_zero__takes_the_bucket_on_a_gpu_whole_and_offload_takes_the_optimizer_to_the_host():
    head = Head(1000)
    difference = zero(head, 2, 2).peak - zero(head, 2, 2, on_gpu=False).peak
    assert difference == 4 * (DEEPSPEED_BUCKET - 3000)
    there, away = zero(head, 3, 2), zero(head, 3, 2, offload=True)
    assert (there.moments, away.moments, away.host) == (18_000, 0, 18_000)
    assert away.peak == there.peak - 18_000 - 6000


def test_zero__sends_what_was_traced():
    """Stages 1 and 2: all-reduce and all-gather of 3n numbers; stage 3: gather and reduce-scatter."""
    assert zero(Head(900), 1, 3).sent == all_reduce(10_800, 3) + all_gather(10_800, 3) == 21_600
    assert zero(Head(900), 3, 3).sent == 2 * all_gather(10_800, 3) == 14_400
    large = DEEPSPEED_MAX_LIVE // 2
    assert zero(Head(large), 3, 2).sent == 2 * (4 + 3) * large  # above the limit one weight is gathered again


def test_placed__puts_each_part_on_the_gpu_that_place_says():
    run = planned(llama_base(), seeds=50)  # so many seeds that encoder and decoder are the fullest
    one, two, three = (need_placed(run, gpus) for gpus in (1, 2, 3))
    assert place(0).encoder == torch.device("cpu")
    n = run.head.n
    assert (one.weights, one.moments, one.base) == (12 * n * 50, 24 * n * 50, 2 * run.base.total)
    for need in (two, three):  # the decoder's GPU: its weight and bias, y, no base model
        assert (need.weights, need.moments, need.gradients, need.base) == (8 * n * 50, 16 * n * 50, 4 * n, 0)


def test_offloaded__leaves_the_base_model_alone_on_its_gpu():
    """Fails if encoder, decoder, moments, x, y or vectors of pruning are counted on the device."""
    for head in (planned(llama_base()).head, replace(planned(llama_base()).head, n=1000)):
        run = replace(planned(llama_base()), head=replace(head, spectral_items=5), has_steps=False)
        need = need_offloaded(run)
        assert (need.weights, need.moments, need.gradients, need.step_buffers) == (0, 0, 0, 0)
        work = need.base_buffers + need.activations + need.indices
        assert need.peak == need.base + work + max(need.spectral, need.held_out)
        assert need.host == 12 * head.n + need.pre_prune + need.indices


def test_closed_form__has_no_moments_and_no_vectors_of_a_step():
    run = planned(llama_base())
    with_steps, without = need_placed(run, 1), need_placed(replace(run, has_steps=False), 1)
    assert with_steps.weights == without.weights > 0 and with_steps.moments > 0
    assert (without.moments, without.gradients, without.step_buffers) == (0, 0, 0)


def test_sliced_and_fsdp__fall_with_the_number_of_ranks_and_zero_keeps_whole_gradients():
    run = planned(llama_base())
    for need_of in (need_sliced, need_fsdp):
        few, many = need_of(run, 2), need_of(run, 64)
        assert many.weights + many.moments + many.gradients < (few.weights + few.moments + few.gradients) / 20
    assert need_fsdp(run, 64).base < need_sliced(run, 64).base / 60
    assert need_zero(run, 3, 64).gradients == 8 * run.head.n


def test_peak__is_the_largest_of_the_three_times():
    need = Need(base=10, weights=1, step_buffers=5, base_buffers=2, activations=1)
    assert need.peak == 16
    assert Need(base=10, weights=1, step_buffers=2, base_buffers=4, activations=3).peak == 18
    pruning = Need(base=10, weights=1, step_buffers=5, base_buffers=2, pre_prune=100)
    assert (pruning.peak, pruning.peak_on_host) == (16, 112)
    assert Need(base=10, weights=1, moments=4, spectral=9, activations=3).peak == 23


def test_sizes__of_a_huge_model_are_exact_integers():
    base = llama_base(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, vocab_size=128256)
    run = planned(base)
    assert base.n > 2**31
    for _, _, need in needs_of(run, 512, 1e15, several_nodes=True):
        assert all(isinstance(value, int) and value >= 0 for value in vars(need).values())


# --- the command


def test_plan__prints_a_line_for_every_engine_and_level_and_marks_one(config_file, capsys):
    assert main(["plan", "--config_json", str(config_file), "--gpus", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "accelerate_configs/" in line]) == 30
    (best,) = [line for line in lines if "<- recommended" in line]
    assert best.startswith("all") and "multi_gpu.yaml" in best and " sliced " in best


def test_plan__of_a_directory_with_only_a_config(tmp_path, config_file, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config_file.read_text())
    assert main(["plan", "--model", str(tmp_path / "model"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n"] == llama_base().n and found["num_weights"] == llama_base().total


def test_plan__knows_masked_models(tmp_path, capsys):
    model = tiny.base_model("bert", 57)
    model.config.save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--json", "--gpus", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == ParameterSpace.of_model(model).size


def test_plan__recommends_cutting_the_base_then_pruning_then_nothing(config_file, capsys):
    """Fails if the recommendation does not follow the memory: less and less of it."""
    found = []
    for memory in ("1", "0.0016", "0.0012", "0.000001"):
        command = ["plan", "--config_json", str(config_file), "--gpus", "4", "--gpu_memory", memory, "--json"]
        assert main(command) == 0
        lines = json.loads(capsys.readouterr().out)["lines"]
        found.append([(line["engine"], line["topk"]) for line in lines if line["recommended"]])
        assert all(line["fits"] == (line["need"]["peak"] <= 0.92 * float(memory) * 2**30) for line in lines)
    assert found[0] == [("sliced", 1.0)]
    assert found[-1] == []
    levels = [best[0][1] for best in found[:-1] if best]
    assert levels == sorted(levels, reverse=True)


def test_plan__of_one_gpu_and_of_several_nodes(config_file, capsys):
    assert main(["plan", "--config_json", str(config_file), "--gpus", "1", "--pre_prune_topk", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "single.yaml   <- recommended" in out and "sliced" not in out
    assert main(["plan", "--config_json", str(config_file), "--gpus", "16"]) == 0
    out = capsys.readouterr().out
    assert "multi_gpu_nodes.yaml   <- recommended" in out and "fsdp2_nodes.yaml" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--model"),
        (["--model", "/no/such/place"], "/no/such/place"),
        (["--config_json", "/no/such/file.json"], "config_json=/no/such/file.json"),
        (["--config_json", "{config}", "--gpus", "0"], "gpus=0"),
        (["--config_json", "{config}", "--gpus", "many"], "--gpus"),
        (["--config_json", "{config}", "--gpu_memory", "nan"], "gpu_memory=nan"),
        (["--config_json", "{config}", "--pre_prune_topk", "0"], "pre_prune_topk"),
        (["--config_json", "{config}", "--dtype", "int8"], "--dtype"),
        (["--config_json", "{config}", "--params", "nothing.*"], "nothing.*"),
        (["--config_json", "{broken}"], "is no JSON"),
        (["--config_json", "{untyped}"], "model_type"),
        (["--config_json", "{unknown}"], "configuration"),
        (["--config_json", "{seq2seq}"], "encoder-decoder"),
        (["--config_json", "{config}", "--unknown", "1"], "--unknown"),
    ],
)
def test_plan__bad_input_is_one_sentence_and_code_2(arguments, named, config_file, tmp_path, capsys):
    contents = {
        "broken": "{",
        "untyped": "{}",
        "unknown": '{"model_type": "nonesuch"}',
        "seq2seq": '{"model_type": "t5"}',
    }
    files = {"config": config_file}
    for name, text in contents.items():
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(text)
    assert main(["plan", *(argument.format(**files) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradiend-dist plan: error: ") and captured.err.count("\n") == 1
    assert named in captured.err


@pytest.mark.parametrize(
    ("options", "free", "told"),
    [
        ({}, 10**12, None),
        ({}, "base + 4 n", ("offload=true", "topk 0.01", "more GPUs")),
        ({"offload": True}, "base + 4 n", None),
        ({"offload": True}, 1000, ("more GPUs",)),
        ({"pre_prune_config": PrePruneConfig(n_samples=4, topk=0.01)}, "base + 4 n", None),
    ],
    ids=str,
)
def test_memory__that_does_not_suffice_is_told_with_what_would(options: dict[str, Any], free: Any, told: Any) -> None:
    """Fails if a run is refused only when its weights are loaded, or without the arguments that would fit."""
    base, args = llama_base(), TrainingArguments(**options)
    needs = Forecast(run_of(base, args, 9), 2)
    need = need_offloaded(needs.run) if args.offload else need_placed(needs.run, 1)
    room = need.base + 4 * base.n if isinstance(free, str) else free
    if told is None:
        check_memory(needs, need, args, room, "cuda:0")
        return
    with pytest.raises(UserError, match="on cuda:0, where") as error:
        check_memory(needs, need, args, room, "cuda:0")
    assert all(words in str(error.value) for words in told)
    assert ("offload" in str(error.value)) == ("offload=true" in told)
