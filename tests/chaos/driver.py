"""Signals at random times to launcher, one rank or all of a run, which is then started again until it has ended.

    python tests/chaos/driver.py --tries 50 --seed 1
    python tests/chaos/driver.py --seed 1 --only 17        # again, what was broken

Each try is a run that is disturbed up to three times, on the same or other numbers of ranks, and then left in peace.
What must hold: all processes end within a minute and leave no orphan; a rank says nothing or one line, never a
traceback; the last start ends well, and all results are those of an undisturbed run: bit for bit where the number of
ranks never changed, else up to the order of sums.
"""

# ruff: noqa: E402  the path is set before what it is needed for

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "distributed")]

import conftest  # noqa: F401  sets what must be set before the first import of torch
import yaml
from processes import END_WITHIN, Broken, Forked, Launch, Real, Way
from test_faults import assert_same, close, result_of

import gradiend_dist.commands.evaluate
import gradiend_dist.commands.train  # noqa: F401  imported before the first fork
from gradiend_dist import demo

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGKILL)
SINGLE = Way("single", 1)
FORKED = (SINGLE, Way("sliced 2", 2), Way("sliced 3", 3), Way("fsdp2", 2), Way("zero1", 2))
REAL = (
    Way("single", 1, is_real=True, config="single"),
    Way("sliced 2", 2, is_real=True, config="cpu_2"),
    Way("fsdp2", 2, is_real=True, config="fsdp2"),
    Way("zero1", 2, is_real=True, config="zero1"),
)
# Sums in another order, which Adam's first steps carry into single weights: as in test_faults.
TOLERANCE = 2e-4
# Signals, from which on each phase should have met one.
ENOUGH = 150
# Of a launch that is left alone, on a busy machine.
LIMIT = 240.0
REACHED = {
    "loading": "rows:",
    "pruning": "one process|ranks, engine",
    "closed form": "pre-prun|kept",
    "training": "step 0:",
    "second seed": "seed 0: ",
    "ending": "seed 1: ",
}


@dataclass
class Stage:
    """A base model, its data, a run over them, and what each way of launching makes of it."""

    root: Path
    run_file: Path
    seconds: dict[str, float] = field(default_factory=dict)
    """How long an undisturbed launch takes."""
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluated: dict[str, str] = field(default_factory=dict)

    @classmethod
    def build(cls, root: Path) -> Stage:
        model, data = demo.build_masked_lm(root / "model"), root / "data"
        data.mkdir()
        for name, frame in demo.feature_data().items():
            frame.to_csv(data / f"{name}.csv", index=False)
        values = {
            "model": str(root / "model" if model is None else model),
            "data": str(data),
            "target_classes": ["M", "F"],
            "pre_prune_config": {"n_samples": 4, "topk": 0.11, "source": "diff"},
            "train_batch_size": 5,
            "train_max_size": 33,
            "encoder_eval_train_max_size": 4,
            "encoder_eval_max_size": 4,
            "max_steps": 10,
            "eval_steps": 3,
            "save_steps": 2,
            "learning_rate": 0.01,
            "lr_scheduler_type": "linear",
            "max_seeds": 2,
            "min_convergent_seeds": None,
            "logging_steps": 1,
            "ddp_timeout": 30,
        }
        path = root / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        return cls(root, path)

    def start(self, way: Way, output: Path) -> Launch:
        if way.is_real:
            return Real(way, self.run_file, output)
        arguments = ["--config", str(self.run_file), "--experiment_dir", str(output)]
        return Forked(way, "commands.train", arguments, output.with_suffix(".log"))

    def start_evaluation(self, run: Path) -> Forked:
        arguments = [
            str(run),
            "--max_size",
            "6",
            "--plot",
            "false",
            "--lrs",
            "0.01",
            "0.03",
            "0.1",
            "0.3",
            "1.0",
            "3.0",
        ]
        return Forked(SINGLE, "commands.evaluate", arguments, run.with_suffix(".evaluation.log"))

    def undisturbed(self, way: Way) -> dict[str, Any]:
        """What the run gives when nobody touches it."""
        if way.name not in self.expected:
            output = self.root / f"undisturbed {way.name}{' real' * way.is_real}"
            start = time.monotonic()
            finish(self.start(way, output))
            self.seconds[way.name] = time.monotonic() - start
            self.expected[way.name] = result_of(output)
        return self.expected[way.name]


@dataclass
class Try:
    """One run with its disturbances; a pure function of the two seeds."""

    stage: Stage
    rng: random.Random
    output: Path
    real: bool
    signals: list[str] = field(default_factory=list)
    """What was sent, to whom and when."""
    reached: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        ways = [self.rng.choice(REAL if self.real else FORKED)]
        if not self.real and not ways[0].name.startswith(("fsdp", "zero")) and self.rng.random() < 0.3:
            ways += [way for way in FORKED[:3] if way != ways[0]]  # goes on with another number of ranks
        expected = self.stage.undisturbed(ways[0])
        used = {ways[0]}
        way = ways[0]
        for _ in range(self.rng.randint(1, 3)):
            if self.disturb(self.stage.start(way, self.output), way):
                break
            way = self.rng.choice(ways)
            self.stage.undisturbed(way)
            used.add(way)
        finish(self.stage.start(way, self.output))
        found = result_of(self.output)
        if len(used) == 1:
            assert_same(found, expected)
        else:
            self.require_close(found, [self.stage.undisturbed(way) for way in sorted(used, key=lambda way: way.ranks)])
        left = [
            path.name for path in (*self.output.rglob(".*"), *self.output.glob("*.lock"), *self.output.glob("state"))
        ]
        if left:
            raise Broken(f"left behind: {', '.join(left)}")

    def require_close(self, found: dict[str, Any], candidates: list[dict[str, Any]]) -> None:
        """To what one of the numbers of ranks gives alone: which entry is the last one kept by pruning, and which of
        two seeds that are equally good is taken, is decided by rounding, and by those ranks that came so far."""
        reasons = []
        for expected in candidates:
            best, other = found["stats"]["best_seed"], expected["stats"]["best_seed"]
            differing = sum((found["indices"][name] != t).sum().item() for name, t in expected["indices"].items())
            if best != other or differing:
                reasons.append(f"best seed {best}, {other}; {differing} indices differ")
                continue
            difference = close(found, expected)
            if difference <= TOLERANCE:
                return
            reasons.append(f"weights differ by {difference:.1e}")
        raise Broken(" / ".join(reasons))

    def evaluate(self, run: Path) -> None:
        """Kills in an evaluation with its grid: started again, it says the same."""
        shutil.copytree(run, self.output, ignore=shutil.ignore_patterns("decoder*", "encoder*"))
        expected = self.stage.evaluated.setdefault("single", "") or self.evaluation_of(run)
        for _ in range(self.rng.randint(1, 3)):
            if self.disturb(self.stage.start_evaluation(self.output), SINGLE, "evaluation"):
                break
        found = self.evaluation_of(self.output)
        if found != expected:
            raise Broken(f"the evaluation differs:\n{found}\n{expected}")

    def evaluation_of(self, run: Path) -> str:
        start = time.monotonic()
        launch = self.stage.start_evaluation(run)
        finish(launch)
        self.stage.seconds.setdefault("evaluation", time.monotonic() - start)
        lines = [line for line in launch.text.splitlines() if not re.match(r".*(Loading|it/s|points|grid)", line)]
        text = "\n".join(lines[-12:]).replace(str(run), "RUN")
        if not self.stage.evaluated.get("single"):
            self.stage.evaluated["single"] = text
        return text

    def disturb(self, launch: Launch, way: Way, what: str = "") -> bool:
        """One signal; True: the run had ended before it came."""
        number = self.rng.choice(SIGNALS)
        target = self.rng.choice(["launcher", "all", str(self.rng.randrange(way.ranks))])
        after = self.rng.random() * self.stage.seconds[what or way.name] * 1.05
        try:
            deadline = time.monotonic() + after
            while time.monotonic() < deadline and launch.poll() is None:
                time.sleep(0.005)
            if launch.poll() is not None:
                require_end(launch, 0)
                return True
            self.note_phase(launch.text, what)
            launch.send(number, target)
            self.signals.append(f"{number.name} to {target} of {what or way.name} after {after:.2f} s")
            require_end(launch, None)
            return False
        finally:
            launch.end()

    def note_phase(self, text: str, what: str) -> None:
        seen = [name for name, pattern in REACHED.items() if re.search(pattern, text)]
        self.reached[what or (seen[-1] if seen else "starting")] += 1


def finish(launch: Launch) -> None:
    """Leave it alone until it has ended well."""
    deadline = time.monotonic() + LIMIT
    try:
        while launch.poll() is None:
            if time.monotonic() > deadline:
                raise Broken(f"an undisturbed start did not end:\n{launch.text[-3000:]}")
            time.sleep(0.01)
        require_end(launch, 0)
    finally:
        launch.end()


def require_end(launch: Launch, code: int | None) -> None:
    """All processes end, with at most one line of ours and no traceback of a rank."""
    deadline = time.monotonic() + END_WITHIN
    while (launch.poll() is None or launch.alive()) and time.monotonic() < deadline:
        time.sleep(0.01)
    if launch.poll() is None or launch.alive():
        raise Broken(f"hangs: launcher {launch.poll()}, ranks {launch.alive()}\n{launch.text[-3000:]}")
    if code is not None and launch.poll() != code:
        raise Broken(f"exit code {launch.poll()}:\n{launch.text[-3000:]}")
    real = isinstance(launch, Real)
    tracebacks = re.findall(r"\]: Traceback" if real else r"^Traceback", launch.text, re.M)
    lines = re.findall(r"^(?:\[\w+\]:)?gradiend-dist \w+: .*", launch.text, re.M)
    if tracebacks or len(lines) > 1:
        raise Broken(f"{len(tracebacks)} tracebacks, lines {lines}:\n{launch.text[-6000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="runs, each with up to three signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this try alone")
    parser.add_argument("--real", action="store_true", help="by `accelerate launch`; takes ten times longer")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further try after this")
    options = parser.parse_args()
    began, sent, held, broken, reached = time.monotonic(), 0, 0, [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="chaos_") as directory:
        stage = Stage.build(Path(directory))
        numbers = range(options.tries) if options.only is None else [options.only]
        for number in numbers:
            if time.monotonic() - began > 60 * options.minutes:
                break
            rng = random.Random(f"{options.seed}/{number}")
            one = Try(stage, rng, stage.root / f"try_{number}", options.real)
            try:
                if not options.real and rng.random() < 0.15:
                    stage.undisturbed(SINGLE)
                    one.evaluation_of(stage.root / "undisturbed single")
                    one.evaluate(stage.root / "undisturbed single")
                else:
                    one.run()
                held += 1
            except (Broken, AssertionError, OSError, ValueError, KeyError) as error:
                broken.append(number)
                again = f"--seed {options.seed} --only {number}{' --real' * options.real}"
                where = traceback.extract_tb(error.__traceback__)[-1].line
                words = f"{type(error).__name__}: {error} ({where})"
                print(f"BROKEN {again}: {'; '.join(one.signals)}\n  {words}", flush=True)
            sent += len(one.signals)
            reached += one.reached
            print(f"{number}: {'; '.join(one.signals) or 'ended before the signal'}", flush=True)
            shutil.rmtree(one.output, ignore_errors=True)
    missed = [phase for phase in (*REACHED, "evaluation") if sent >= ENOUGH and not reached[phase]]
    print(f"tried {held + len(broken)} runs with {sent} signals: {held} held, {len(broken)} broken {broken}")
    print(", ".join(f"{count} {name}" for name, count in reached.most_common()))
    if missed:
        print(f"no signal came in: {', '.join(missed)}")
    return 1 if broken or missed else 0


if __name__ == "__main__":
    sys.exit(main())
