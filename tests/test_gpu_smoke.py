"""The parts of `make gpu-smoke` that need no GPU: what is off is told, and without GPUs it refuses with one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import gpu_smoke


@pytest.mark.parametrize("count", [0, 1])
def test_main__without_two_gpus_refuses_with_one_line(count, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert gpu_smoke.main([]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and not told.out
    assert ("no GPU is visible" if count == 0 else "1 GPU is visible") in told.err


@pytest.mark.parametrize(
    ("losses", "expected", "off"),
    [
        ([1.0, 0.5], [1.0, 0.5 * (1 + 1e-5)], None),
        ([1.0, 0.5], [1.0, 0.51], "differ from those of one process by 2.0e-02"),
        ([1.0, float("nan")], [1.0, 0.5], "differ"),
        ([1.0], [1.0, 0.5], "1 losses, and 2 of one process"),
        ([1.0], None, "1 losses, and no of one process"),
        (None, [1.0], "without a model (the last line)"),
    ],
)
def test_compare__tells_what_is_off(losses, expected, off):
    row = gpu_smoke.compare("fsdp2", losses, expected, 3.0, "the last line")
    assert (row.off is None) if off is None else (off in row.off and row.off.startswith("fsdp2: "))


def test_judge_kill__wants_a_run_that_ends_with_a_failure():
    assert gpu_smoke.judge_kill(True, 1, 2.0).off is None
    for killed, code, off in ((False, 0, "was over before"), (True, None, "did not end"), (True, 0, "all is well")):
        assert off in gpu_smoke.judge_kill(killed, code, 2.0).off


def test_judge_step__tells_waits_bandwidth_and_memory():
    good = {"waits": None, "bytes_per_second": 2e12, "copy_bytes_per_second": 3e12, "peak": 100, "forecast": 99}
    assert [row.off for row in gpu_smoke.judge_step(good)] == [None, None, None]
    bad = {**good, "waits": "called a synchronizing operation", "bytes_per_second": 1e12, "peak": 120}
    told = [row.off for row in gpu_smoke.judge_step(bad)]
    assert "called a synchronizing" in told[0] and "3.0 times as long" in told[1] and "1.21 times" in told[2]
    (failed,) = gpu_smoke.judge_step(None)
    assert "without a result" in failed.off


def test_table__has_a_line_for_each_thing_and_one_for_each_that_is_off():
    rows = [gpu_smoke.Row("single", "3 s"), gpu_smoke.Row("fsdp2", "failed", "fsdp2: it ended")]
    assert gpu_smoke.table(rows) == "single  3 s\nfsdp2   failed  <- off\noff: fsdp2: it ended"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_rehearsal__runs_through_on_cpus(tmp_path):
    """The same trainings, the kill and the resume, on ranks of this machine."""
    command = [sys.executable, str(gpu_smoke.__file__), "--rehearse", "--directory", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    assert [line.split("  ")[0] for line in ended.stdout.splitlines()] == [
        *gpu_smoke.WAYS, "one rank killed", "resumed on 1 of 2 ranks", "bandwidth of a step",
    ]  # fmt: skip
    assert json.loads((tmp_path / "step.json").read_text())["waits"] == "not asked of a CPU"
