"""Started by test_zero_engine.py under `accelerate launch`: trains with DeepSpeed and, beside it, in one process.

Rank 0 writes what it found, one entry for each case, to the JSON file that is the only argument.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from gradiend_dist.distributed.comm import Comm
from gradiend_dist.engines.base import Engine, GradiendBatch, StepOptions
from gradiend_dist.engines.sliced import SlicedEngine
from gradiend_dist.engines.zero import ZeroEngine
from gradiend_dist.errors import UserError
from gradiend_dist.model.gradiend import ParamMappedGradiendModel
from gradiend_dist.space import ParameterSpace
from gradiend_dist.storage.layout import STATE_ZERO_FACTS

NUM_STEPS = 6
LINEAR = torch.nn.functional.linear


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...] = (1,)
    n: int = 103
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    """Changes of the DeepSpeed configuration."""
    flips: dict[int, bool] = field(default_factory=dict)
    """Before which step to flip, and whether with the decoder's bias."""
    bad_step: int | None = None
    bad_value: float = float("nan")
    only_on_rank: int | None = None
    in_target: bool = False


CASES = {
    "one_item": Case(),
    "three_items": Case((3,)),
    "accumulation": Case((2, 1)),
    "clipping": Case((3,), options={"max_grad_norm": 0.02, "epsilon": 1e-3}),
    "clipping_some": Case((2, 1), options={"max_grad_norm": 0.3, "epsilon": 1e-3}),
    "adam": Case((2,), options={"optim": "adam", "betas": (0.5, 0.7), "weight_decay": 0.3}),
    "supervised_encoder": Case((3,), options={"supervised": "encoder"}, flips={4: False}),
    "supervised_decoder": Case((3,), options={"supervised": "decoder"}, flips={4: False}),
    "latent_dim_2": Case((2,), model={"latent_dim": 2}, flips={3: False}),
    "no_decoder_bias": Case((2,), model={"bias_decoder": False}, flips={3: False, 5: True}),
    "activations": Case((2,), model={"activation_encoder": "gelu", "activation_decoder": "tanh"}),
    "flip": Case((2,), flips={0: False, 3: False}),
    "flip_with_bias": Case((2,), flips={3: True, 5: False}),
    "nan": Case((2,), bad_step=3),
    "nan_first": Case((2,), bad_step=0, flips={1: False}),
    "nan_on_one_rank": Case((2,), bad_step=3, only_on_rank=1),
    "loss_overflows_gradients_do_not": Case((1,), bad_step=3, bad_value=2.5e19, in_target=True),
    "fewer_entries_than_ranks": Case((2,), n=1),
    "offload_optimizer": Case((2,), zero={"offload_optimizer": {"device": "cpu"}}, flips={3: False}, bad_step=5),
}
RESUMED = ("flip", "latent_dim_2", "supervised_encoder", "flip_with_bias", "offload_optimizer")
RESUMED_AT_STAGE_3 = ("kept_whole",)
KEPT_WHOLE = {"stage3_param_persistence_threshold": 100_000}  # DeepSpeed's default: small weights stay gathered
STAGE_3_CASES = {
    "kept_whole": Case((3,), zero=KEPT_WHOLE, flips={3: False}),
    "offload_param": Case((3,), zero={"offload_param": {"device": "cpu"}}, flips={3: False}),
}


def step_options(**changes: Any) -> StepOptions:
    plain = StepOptions(
        "adamw", weight_decay=0.01, betas=(0.9, 0.999), epsilon=1e-8, max_grad_norm=0.0, supervised=None
    )
    return replace(plain, **changes)


def make_model(case: Case, seed: int = 2) -> ParamMappedGradiendModel:
    space = ParameterSpace([("weight", (case.n,), None)])
    return ParamMappedGradiendModel(space, generator=torch.Generator().manual_seed(seed), **case.model)


def make_batches(case: Case, step: int) -> list[GradiendBatch]:
    generator = torch.Generator().manual_seed(step)
    axis = torch.randn(case.n, generator=torch.Generator().manual_seed(99))
    batches = []
    for size in case.sizes:
        label = torch.randint(0, 2, (size, 1), generator=generator).float() * 2 - 1
        source = label * axis + 0.5 * torch.randn(size, case.n, generator=generator)
        target = 2 * label * axis + 0.3 * torch.randn(size, case.n, generator=generator)
        batches.append(GradiendBatch(source, target, label))
    return batches


def spoil(batches: list[GradiendBatch], case: Case) -> None:
    tensor = batches[-1].target if case.in_target else batches[-1].source
    assert tensor is not None
    tensor[-1, case.n // 2] = case.bad_value


class Lab:
    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.comm = Comm.join(timeout=60)
        self.config = accelerator.deepspeed_plugin.deepspeed_config
        self.stage = self.config["zero_optimization"]["stage"]
        if self.stage == 3:  # so that small weights are cut as large ones are
            self.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    def engine(self, case: Case, seed: int = 2) -> ZeroEngine:
        section = self.config["zero_optimization"]
        before = copy.deepcopy(section)
        section.update(case.zero)
        engine = ZeroEngine(make_model(case, seed), step_options(**case.options), self.comm, self.accelerator)
        section.clear()
        section.update(before)
        return engine

    def advance(self, engine: Engine, case: Case, step: int) -> Tensor:
        if step in case.flips:
            engine.flip(with_decoder_bias=case.flips[step])
        batches = make_batches(case, step)
        is_zero = isinstance(engine, ZeroEngine)
        if step == case.bad_step and (not is_zero or case.only_on_rank in (None, self.comm.rank)):
            spoil(batches, case)
        return engine.step(batches, learning_rate=3e-3 * (1 + step % 3))

    def compare(self, case: Case) -> dict[str, Any]:
        """Largest differences to the single process, relative to the largest number of each kind; and facts."""
        placed = SlicedEngine(make_model(case), step_options(**case.options))
        zero = self.engine(case)
        start = make_model(case).state_dict()
        found: dict[str, Any] = {"report": 0.0, "unchanged_by_bad_step": True, "bad_step_shows": True}
        for step in range(NUM_STEPS):
            before = zero.weights().state_dict() if step == case.bad_step else {}
            expected, actual = self.advance(placed, case, step), self.advance(zero, case, step)
            if step == case.bad_step:
                found["bad_step_shows"] = not bool(actual[:2].isfinite().all())
                found["unchanged_by_bad_step"] = same(before, zero.weights().state_dict())
                expected, actual = expected[2:], actual[2:]
            found["report"] = max(found["report"], difference(actual, expected))
        found["same_on_all_ranks"] = len({str(r) for r in self.comm.gather(actual.tolist())}) == 1
        found["weights"] = self.weight_difference(zero, placed)
        found["moved"] = difference(placed.model.decoder_weight, start["decoder.0.linear.weight"]) + difference(
            placed.model.encoder_weight, start["encoder.0.linear.weight"]
        )
        model, weights = zero.encoding_model(), full_weights(zero, self.comm)
        found["encoding_model"] = (
            model.slices.is_whole
            and torch.equal(model.encoder_weight, weights["encoder.0.linear.weight"])
            and torch.equal(model.encoder_bias, weights["encoder.0.linear.bias"])
        )
        return found

    def weight_difference(self, zero: ZeroEngine, placed: SlicedEngine) -> float:
        actual = full_weights(zero, self.comm)
        expected = placed.model.state_dict()
        assert actual.keys() == expected.keys()
        return max(difference(actual[name], expected[name]) for name in expected)

    def resume(self, case: Case, directory: Path) -> dict[str, Any]:
        """Saved in the middle, loaded into an engine that has another start: the rest must be the same to the bit."""
        through = self.engine(case)
        for step in range(4):
            self.advance(through, case, step)
        through.save_own(directory)
        expected = [self.advance(through, case, step).tolist() for step in range(4, NUM_STEPS)]
        resumed = self.engine(case, seed=9)
        resumed.load_own(directory)
        actual = []
        for step in range(4, NUM_STEPS):
            resumed.encoding_model()  # as an evaluation between two steps does
            actual.append(self.advance(resumed, case, step).tolist())
        equal = same(full_weights(through, self.comm), full_weights(resumed, self.comm))
        return {
            "same_reports": str(actual) == str(expected),
            "same_weights": equal,
            **self.refusals(resumed, directory),
        }

    def refusals(self, engine: ZeroEngine, directory: Path) -> dict[str, str]:
        facts = json.loads((directory / STATE_ZERO_FACTS).read_text())
        found = {}
        for name, value in (("world_size", 3), ("zero_stage", 0)):
            self.comm.meet("reading")
            if self.comm.is_first:
                (directory / STATE_ZERO_FACTS).write_text(json.dumps({**facts, name: value}))
            self.comm.meet("writing")
            found[name] = complaint(engine, directory)
        found["empty"] = complaint(engine, directory / "nothing")
        return found

    def together(self) -> dict[str, Any]:
        """Two seeds with different settings at the same time, step by step."""
        cases = [Case((2,)), Case((2,), options={"max_grad_norm": 0.02})]
        zeros = [self.engine(case, seed) for seed, case in enumerate(cases)]
        placed = [SlicedEngine(make_model(case, seed), step_options(**case.options)) for seed, case in enumerate(cases)]
        for step in range(NUM_STEPS):
            for engines in (zeros, placed):
                for engine, case in zip(engines, cases, strict=True):
                    self.advance(engine, case, step)
        pairs = zip(zeros, placed, strict=True)
        return {"weights": max(self.weight_difference(zero, one) for zero, one in pairs)}

    def memory(self) -> dict[str, Any]:
        """A finished engine leaves nothing: neither itself nor its weights, masters and moments."""
        case = Case((1,), n=1_000_003)
        left = []
        for _ in range(3):
            engine = self.engine(case)
            for step in range(2):
                self.advance(engine, case, step)
            watched = [weakref.ref(thing) for thing in (engine.engine, engine.engine.optimizer, engine.model)]
            del engine
            gc.collect()
            left.append(sum(thing() is not None for thing in watched))
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.numel() > 100_000]
        return {"left": left, "large_tensors": len(tensors)}


def complaint(engine: ZeroEngine, directory: Path) -> str:
    try:
        engine.load_own(directory)
    except UserError as error:
        return str(error)
    return "accepted"


def difference(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape, f"{actual.shape} for {expected.shape}"
    return float((actual - expected).abs().max() / expected.abs().max())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def full_weights(zero: ZeroEngine, comm: Comm) -> dict[str, Tensor]:
    """All ranks' parts put together as their model says; what all ranks have must be the same on all."""
    own = zero.weights()
    pieces = comm.gather((own.slices.ranges[0], own.state_dict()))
    along_n = {"encoder.0.linear.weight": 1, "decoder.0.linear.weight": 0, "decoder.0.linear.bias": 0}
    assert [start for (start, _), _ in pieces[1:]] == [stop for (_, stop), _ in pieces[:-1]]
    assert all(torch.equal(part["encoder.0.linear.bias"], own.encoder_bias) for _, part in pieces)
    return {
        name: torch.cat([part[name] for _, part in pieces], along_n[name]) if name in along_n else tensor
        for name, tensor in own.state_dict().items()
    }


def main() -> None:
    start = time.monotonic()
    torch.set_num_threads(1)
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    lab = Lab(accelerator)
    gc.freeze()  # every new engine collects garbage: the libraries need not be searched each time
    found: dict[str, Any] = {"facts": {"stage": lab.stage, "world_size": lab.comm.world_size}}
    cases = CASES | (STAGE_3_CASES if lab.stage == 3 else {})
    for name, case in cases.items():
        found[name] = lab.compare(case)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(lab.comm.decide(scratch))
        for name in (*RESUMED, *(RESUMED_AT_STAGE_3 if lab.stage == 3 else ())):
            case = replace(cases[name], flips={2: False, 5: False})
            found[f"resume_{name}"] = lab.resume(case, directory / name)
        lab.comm.meet("resuming")
    found["together"] = {**lab.together(), "linear_is_torchs": torch.nn.functional.linear is LINEAR}
    found["memory"] = lab.memory()
    found["facts"]["seconds"] = round(time.monotonic() - start, 1)
    if lab.comm.is_first:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    lab.comm.meet("writing")
    accelerator.end_training()
    os._exit(0)


if __name__ == "__main__":
    main()
