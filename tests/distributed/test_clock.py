"""Where the time of a run is counted: sections add up, nested ones count once, and a GPU is not waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradiend_dist.distributed import clock as clock_module
from gradiend_dist.distributed.clock import SECTIONS, Clock
from gradiend_dist.distributed.comm import Comm


class Time:
    """A clock that goes on when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clock_module.time, "perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_sections__count_for_themselves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a gradient that is computed inside the gathering of data counts for both."""
    time = Time(monkeypatch)
    clock = Clock()
    with clock.spending("data"):
        time.pass_by(1.0)
        with clock.spending("base_gradient"):
            time.pass_by(2.0)
            with clock.spending("communication"):
                time.pass_by(4.0)
            with clock.spending("communication"):
                time.pass_by(8.0)
        time.pass_by(16.0)
    with clock.spending("gradiend"):
        time.pass_by(32.0)
    expected = {"data": 17.0, "base_gradient": 2.0, "communication": 12.0, "gradiend": 32.0}
    assert clock.sections() == {**dict.fromkeys(SECTIONS, 0.0), **expected}
    assert clock.total() == sum(expected.values())


def test_as_dict__has_the_references_names_and_goes_on_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = Clock()
    for seconds, what in enumerate(SECTIONS, start=1):
        with clock.spending(what):
            time.pass_by(float(seconds))
    found = clock.as_dict()
    assert (found["data_preparation"], found["model_with_gradiend"], found["eval"]) == (1 + 2, 3 + 4, 5)
    assert found["total"] == 21
    later = Clock()
    later.go_on(found)
    time.pass_by(2.0)
    assert later.as_dict() == {**found, "total": 23}


def test_section__that_fails_is_counted_and_leaves_the_outer_one_open(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = Clock()
    with clock.spending("evaluation"):
        with pytest.raises(KeyError), clock.spending("save"):
            time.pass_by(1.0)
            raise KeyError
        time.pass_by(2.0)
    assert (clock.sections()["save"], clock.sections()["evaluation"]) == (1.0, 2.0)


def test_collectives__count_as_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    comm = Comm()
    comm.clock = Clock()
    with comm.clock.spending("gradiend"):
        time.pass_by(1.0)
        with comm.exchanging("a sum"):
            time.pass_by(5.0)
    assert (comm.clock.sections()["gradiend"], comm.clock.sections()["communication"]) == (1.0, 5.0)


def test_gpu__is_timed_by_events_that_are_read_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for CUDA events: nothing is waited for inside a section."""
    time = Time(monkeypatch)
    waited: list[float] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "the stream of cuda:1"  # not of the current device
            self.at = time.now

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, other: Any) -> float:
            return 1000.0 * (other.at - self.at)

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"the stream of {device}")
    clock = Clock(torch.device("cuda:1"))
    with clock.spending("data"):
        time.pass_by(1.0)
        with clock.spending("base_gradient"):
            time.pass_by(2.0)
    assert not waited
    assert (clock.sections()["data"], clock.sections()["base_gradient"]) == (1.0, 2.0)
    assert waited
