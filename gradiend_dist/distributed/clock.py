"""Where the time of a run goes: data, the base model's gradients, GRADIEND, communication, evaluation, saving."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SECTIONS = ("data", "base_gradient", "gradiend", "communication", "evaluation", "save")

# Two moments: of the host, or events in a GPU's stream.
Span = tuple[Any, Any]


class Clock:
    """Seconds by section. A section inside another one counts for itself alone, so the sections add up.

    On a GPU the host runs ahead of the device. Moments are then events in its stream, which cost no waiting, and are
    read when somebody asks, after the numbers of a step were read anyway.
    """

    def __init__(self, gpu: torch.device | None = None) -> None:
        self.gpu = gpu
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._start = time.perf_counter()
        self._inner: list[Span] | None = None
        self._passed: list[tuple[str, Span, list[Span]]] = []

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        outer = self._inner
        inner: list[Span] = []
        self._inner = inner
        start = self._now()
        try:
            yield
        finally:
            span = (start, self._now())
            self._passed.append((what, span, inner))
            self._inner = outer
            if outer is not None:
                outer.append(span)
            if self.gpu is None:
                self._add_up_passed()

    def _now(self) -> Any:
        if self.gpu is None:
            return time.perf_counter()
        import torch  # the report reads the names above, without torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.gpu))  # by default it would be that of GPU 0
        return event

    def _add_up_passed(self) -> None:
        for what, span, inner in self._passed:
            self._seconds[what] += self._length(span) - sum(map(self._length, inner))
        self._passed.clear()

    def _length(self, span: Span) -> float:
        start, stop = span
        if self.gpu is None:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000.0

    def sections(self) -> dict[str, float]:
        self._add_up_passed()
        return dict(self._seconds)

    def total(self) -> float:
        return time.perf_counter() - self._start

    def go_on(self, seconds: dict[str, float]) -> None:
        """After those of an earlier process, as `as_dict` told them."""
        self._seconds = {name: seconds[name] for name in SECTIONS}
        self._start = time.perf_counter() - seconds["total"]

    def as_dict(self) -> dict[str, float]:
        """The reference's names first; in one process they mean what they mean there."""
        own = self.sections()
        return {
            "data_preparation": own["data"] + own["base_gradient"],
            "model_with_gradiend": own["gradiend"] + own["communication"],
            "eval": own["evaluation"],
            "total": self.total(),
            **own,
        }
