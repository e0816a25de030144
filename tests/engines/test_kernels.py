"""The Triton kernels against the chunked step, in Triton's interpreter; and compiled for two GPUs, without one."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels are written in Triton, which is there for Linux alone")
from triton.runtime import interpreter

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from step_traffic import least, traffic

from gradiend_dist.engines import fused, kernels
from gradiend_dist.engines.base import GradiendBatch, StepOptions
from gradiend_dist.engines.halves import DecoderHalf, EncoderHalf
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.model.gradiend import GradiendModel
from gradiend_dist.space import Slices

# Where a step is not finite, or a branch is not taken, numpy tells of what a GPU computes without a word.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

BLOCK = 128
N = BLOCK + 13
"""One whole block, and a rest that is a multiple of nothing."""


def options(**changes: Any) -> StepOptions:
    values = {"optim": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.999), "epsilon": 1e-8, "max_grad_norm": 0.0}
    return StepOptions(**{**values, "supervised": None, **changes})


@pytest.fixture(autouse=True)
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels wherever options do not forbid them, in small blocks."""
    monkeypatch.setattr(fused, "uses_kernels", lambda _weight, options: options.triton_kernels)
    monkeypatch.setattr(fused, "BLOCK", BLOCK)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_without_patching_again)


_patched: set[str] = set()


def call_without_patching_again(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The interpreter replaces Triton's language before every call of a function, which takes most of its time. Within
    a kernel that has been done; for the functions of Triton's own modules once is enough."""
    module = self.fn.__module__
    if module != kernels.__name__ and module not in _patched:
        _patched.add(module)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def pair(
    n: int, latent_dim: int, slices: Slices | None = None, shape: dict[str, Any] | None = None, **changes: Any
) -> tuple[SlicedEngine, SlicedEngine]:
    """The same model twice: stepped by kernels and by chunks."""
    generator = torch.Generator().manual_seed(2)
    model = GradiendModel(n, latent_dim, slices=slices, generator=generator, **(shape or {}))
    by_kernels, by_chunks = (
        SlicedEngine(copy.deepcopy(model), options(triton_kernels=wanted, **changes)) for wanted in (True, False)
    )
    assert isinstance(by_kernels.encoder, fused.FusedEncoderHalf) and type(by_chunks.encoder) is EncoderHalf
    assert isinstance(by_kernels.decoder, fused.FusedDecoderHalf) and type(by_chunks.decoder) is DecoderHalf
    return by_kernels, by_chunks


def batches(n: int, sizes: list[int], seed: int) -> list[GradiendBatch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        GradiendBatch(
            torch.randn(size, n, generator=generator),
            2 * torch.randn(size, n, generator=generator),
            torch.randint(0, 2, (size, 1), generator=generator).float() * 2 - 1,
        )
        for size in sizes
    ]


def state(engine: SlicedEngine) -> dict[str, Tensor]:
    found = engine.state()
    assert found is not None
    return {**found.cut, **found.same}


def assert_same_training(
    by_kernels: SlicedEngine, by_chunks: SlicedEngine, sizes: list[int], num_steps: int, rate: float = 3e-3
) -> None:
    n = by_chunks.slices.size
    for step in range(num_steps):
        given = batches(n, sizes, seed=step)
        expected, found = by_chunks.step(given, rate), by_kernels.step(given, rate)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=lambda text, at=step: f"{at}: {text}")
    for (name, found), expected in zip(state(by_kernels).items(), state(by_chunks).values(), strict=True):
        if found.dtype == torch.bfloat16:  # where float32 differs in the last bit, a rounding can go the other way
            assert (found != expected).double().mean() < 0.02, name
        else:
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * scale, msg=lambda t, at=name: at + t)


# --- equal to the chunked step


# Each activation once, with K and m of 1 to 3 in all pairs, as one batch and as several; the settings in turn.
@pytest.mark.parametrize(
    ("activation", "sizes", "latent_dim", "bias", "changes"),
    [
        ("id", [1], 1, True, {}),
        ("tanh", [2], 1, False, {"optim": "adam", "weight_decay": 0.3}),
        ("gelu", [2, 1], 1, True, {"max_grad_norm": 0.02}),
        ("relu", [1], 2, True, {"betas": (0.0, 0.5), "epsilon": 1e-3}),
        ("leakyrelu", [1, 1], 2, False, {"max_grad_norm": 0.02, "optim": "adam"}),
        ("silu", [3], 2, True, {"weight_decay": 0.3}),
        ("elu", [1], 3, False, {"max_grad_norm": 0.02}),
        ("sigmoid", [2], 3, True, {"optim": "adam", "epsilon": 1e-3}),
        ("smht", [1, 2], 3, True, {"weight_decay": 0.3, "betas": (0.7, 0.9)}),
    ],
    ids=str,
)
def test_kernels__train_as_the_chunked_step_does(activation, sizes, latent_dim, bias, changes):
    """Fails by a wrong term, stride, mask, derivative or setting in any of the kernels."""
    shape = {"activation_decoder": activation, "bias_decoder": bias}
    engines = pair(N, latent_dim, shape=shape, **changes)
    assert_same_training(*engines, sizes, num_steps=20)


@pytest.mark.parametrize("latent_dim", [1, 3])
@pytest.mark.parametrize("n", [1, 15, BLOCK - 1, BLOCK, BLOCK + 16, 2 * BLOCK + 1])
def test_kernels__end_where_the_vector_ends(n, latent_dim):
    """Fails if a block is left out, done twice, or reaches beyond the last entry."""
    assert_same_training(*pair(n, latent_dim), [2], num_steps=2)


@pytest.mark.parametrize("supervised", ["encoder", "decoder"])
def test_kernels__train_one_half_on_labels(supervised):
    by_kernels, by_chunks = pair(N, 1, supervised=supervised)
    start = copy.deepcopy(by_kernels.model.state_dict())
    assert_same_training(by_kernels, by_chunks, [2, 1], num_steps=4)
    for name, weight in by_kernels.model.state_dict().items():
        assert torch.equal(weight, start[name]) != name.startswith(supervised)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels__change_nothing_where_a_number_is_not_finite(value, dtype):
    """Bit for bit, and the next steps are as if it had not been."""
    by_kernels, by_chunks = pair(N, 2, moments_dtype=dtype)
    for engine in (by_kernels, by_chunks):
        engine.step(batches(N, [2], 0), 1e-2)
    before = {name: tensor.clone() for name, tensor in state(by_kernels).items()}
    bad = batches(N, [2], 1)
    bad[0].target[1, N - 1] = value
    found = by_kernels.step(bad, 1e-2)
    assert not found[:2].isfinite().all() and found[2:].isfinite().all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(by_kernels).items())
    assert_same_training(by_kernels, by_chunks, [2], num_steps=2)


@pytest.mark.parametrize("ranges", [((0, N),), ((5, 60), (70, 70), (90, N + 20))], ids=str)
@pytest.mark.parametrize("latent_dim", [1, 3])
def test_kernels__round_moments_with_the_same_random_numbers(latent_dim, ranges):
    """Half of all moments would differ by another number, counted from the wrong place, or taken for another weight."""
    slices = Slices(N + 20, ranges)
    by_kernels, by_chunks = pair(N + 20, latent_dim, slices, moments_dtype="bfloat16")
    assert_same_training(by_kernels, by_chunks, [1], num_steps=3, rate=1e-4)
    assert {t.dtype for name, t in by_kernels.state().cut.items() if "moment" in name} == {torch.bfloat16}


def test_kernels__a_rank_of_nothing_adds_zeros():
    by_kernels, _ = pair(10, 2, Slices(10, ((4, 4),)), max_grad_norm=0.1)
    given = [GradiendBatch(torch.zeros(2, 0), torch.zeros(2, 0), torch.ones(2, 1))]
    assert torch.equal(by_kernels.step(given, 1e-2), torch.zeros(4))


def test_kernels__keep_gradients_of_any_size():
    """Fails if a square is formed of what has the n-th part in it already, and so vanishes in float32."""
    by_kernels, _ = pair(N, 1)
    tiny = [GradiendBatch(batch.source, batch.target * 1e-12, batch.label) for batch in batches(N, [1], 0)]
    by_kernels.model.decoder_weight.zero_()
    by_kernels.model.decoder_bias_vector.zero_()
    loss, norm = by_kernels.step(tiny, 0.0)[:2].double()
    expected = tiny[0].target.double().square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert norm > 1e-16


# --- when they are used


def test_kernels__leave_steps_of_many_products_to_matrix_products(monkeypatch):
    monkeypatch.setattr(fused, "launch", lambda *_args, **_more: pytest.fail("a kernel was launched"))
    by_kernels, by_chunks = pair(N, 3)
    assert_same_training(by_kernels, by_chunks, [5], num_steps=2)


def test_uses_kernels__only_on_gpus_in_float32_and_where_they_are_wanted(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(fused, "_triton_works", lambda: True)

    def weight(device: str, dtype: torch.dtype = torch.float32) -> Any:
        return SimpleNamespace(device=torch.device(device), dtype=dtype)

    assert fused.uses_kernels(weight("cuda:1"), options())
    assert not fused.uses_kernels(weight("cpu"), options())
    assert not fused.uses_kernels(weight("cuda", torch.float64), options())
    assert not fused.uses_kernels(weight("cuda"), options(triton_kernels=False))


@pytest.mark.parametrize("missing", ["pip install triton", "version 3.2.0", "C compiler"])
def test_uses_kernels__says_once_what_is_missing(missing, monkeypatch, caplog):
    monkeypatch.undo()
    fused._triton_works.cache_clear()
    if "install" in missing:
        monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    elif "version" in missing:
        monkeypatch.setattr("triton.__version__", "3.2.0")
    else:
        monkeypatch.setattr("shutil.which", lambda _name: None)
        monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert [fused._triton_works(), fused._triton_works()] == [False, False]
    (record,) = caplog.records
    assert missing in record.message
    fused._triton_works.cache_clear()


# --- compiled


def test_kernels__compile_for_two_gpus_and_keep_everything_in_registers():
    """Down to machine code, with the arguments of real steps. Fails by a spill, or by a load that is cut in pieces."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_script.py"
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    compiled = json.loads(ran.stdout)
    names = "encode encoder_gradient_square update_encoder reduce_decoder update_decoder".split()
    assert {(one["kernel"], one["capability"]) for one in compiled} == {
        (name, gpu) for name in names for gpu in (80, 90)
    }
    for one in compiled:
        assert one["spills"] == 0 and one["stack"] == 0, one
        if one["products"] == 1:
            assert one["wide"] >= 2 and one["narrow"] == 0, f"moves single numbers: {one}"


# --- what they move


@pytest.mark.parametrize(("moments_dtype", "most"), [("float32", 104), ("bfloat16", 80)])
def test_kernels__move_each_number_once(moments_dtype, most, monkeypatch):
    """Fails if a kernel reads anything a second time, or writes what it could keep."""
    monkeypatch.setattr(fused, "BLOCK", 1024)
    n = 2**13
    found = {kernels: traffic(n, 1, 1, moments_dtype, kernels=kernels) for kernels in (True, False)}
    by_kernels, by_operations = (found[kernels].bytes.total() / n for kernels in (True, False))
    must = sum(least(1, 1, moments_dtype).values())
    assert must <= by_kernels <= most
    assert by_operations > 1.8 * must
    assert found[True].launches.total() < found[False].launches.total()
