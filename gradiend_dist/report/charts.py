"""Small charts as inline SVG: sharp at any size, in the colours of the page around them, with values on hover.

Colours, dashes and the hover are CSS classes (page.css): no script, no style attribute, nothing from elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradiend_dist.report.elements import escape, exact, short, shorten

Point = tuple[float, "float | None"]

# Units of the SVG, which fills the width of its panel: on a phone its text still has nine pixels.
WIDTH, HEIGHT = 440.0, 236.0

LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 12.0, 26.0

ROW = 58.0

CHARACTER = 6.0  # width of a digit of a tip

MOST_TIPS = 120

MOST_DOTS = 600

# Looks of a series: +1, -1 and 0 of a feature, and an order for whatever else is told apart.
POSITIVE, NEGATIVE, NEUTRAL = "c0", "c1", "c2"

LOOKS = ("c0", "c3", "c4", "c5", "c1", "c6", "c2")


@dataclass(frozen=True)
class Series:
    """A line; a value of None is a gap. `band` gives the lowest and highest value around each of its points, `chosen`
    is one of them that has a star."""

    name: str
    points: Sequence[Point]
    look: str = POSITIVE
    band: Sequence[tuple[float, float, float]] = ()
    chosen: Point | None = None


@dataclass(frozen=True)
class Scale:
    """Values -> positions; on a logarithmic scale all values are positive."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        ends = (self.low, self.high, value)
        low, high, at = map(math.log, ends) if self.log else ends
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return powers_of_ten(self.low, self.high) if self.log else round_numbers(self.low, self.high)


def round_numbers(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high], at most this many."""
    if not high > low:
        return [low]
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most - 1)
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [round(number * width, 12 - math.floor(math.log10(width))) for number in range(first, last + 1)]


def powers_of_ten(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    y_range: tuple[float, float] | None = None,
    lowest: float = -math.inf,
    thresholds: Sequence[float] = (),
    mark: str = "threshold",
    best: int | None = None,
    x_name: str = "step",
    log_x: bool = False,
) -> str:
    """Lines over steps in a panel with legend; dashed thresholds, which are called `mark`, and the best step dotted.

    What is below `lowest` lies on the edge of the panel; its tip says where it is.
    """
    series = [line for line in series if any(y is not None for _, y in line.points)]
    if not series:
        return panel(title, "", '<p class="empty">nothing recorded yet</p>')
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points if y is not None]
    ys += [y for line in series for _, low, high in line.band for y in (low, high)]
    low, high = _limits([max(y, lowest) for y in ys], y_range)
    x = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log_x)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    best = best if best is not None and x.low <= best <= x.high else None
    body = [*_axes(x, y, x_name)]
    body += [_across(y(value), "mark") for value in thresholds if low <= value <= high]
    body += [_band(line, x, y) for line in series if line.band]
    body += [_upright(x(best), "best")] if best is not None else []
    # The first series is the one that matters: it is drawn last.
    body += [part for line in reversed(series) for part in _line(line, x, y)]
    body += _stars(series, best, x, y) if best is not None else []
    body += [_star(x(at), y(value)) for line in series for at, value in [line.chosen or (0, None)] if value is not None]
    body += _tips(series, x, x_name)
    marked = _key("mark", f"{mark} {_joined(thresholds)}") if thresholds else ""
    return panel(title, _legend(series) + marked, _svg(HEIGHT, title, body))


def _limits(values: Sequence[float], wanted: tuple[float, float] | None) -> tuple[float, float]:
    """The wanted range, or more where values leave it (an encoder without tanh)."""
    low, high = min(values), max(values)
    if wanted is not None:
        return min(low, wanted[0]), max(high, wanted[1])
    low = 0.0 if 0.0 < low < 0.5 * high else low
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low if low == 0.0 else low - room), high + room


def _joined(values: Sequence[float]) -> str:
    symmetric = len(values) == 2 and values[0] == -values[1]
    return f"±{short(abs(values[0]))}" if symmetric else ", ".join(map(short, values))


def _axes(x: Scale, y: Scale, x_name: str) -> Iterator[str]:
    for value in y.ticks():
        yield _across(y(value), "zero" if value == 0 else "grid")
        yield f'<text class="end" x="{LEFT - 7}" y="{y(value) + 4:.1f}">{short(value)}</text>'
    ticks = x.ticks()
    for value in ticks:
        # The name of the axis stands beside its last number.
        text = f"{x_name} {short(value)}" if value == ticks[-1] else short(value)
        anchor = "end" if x(value) > WIDTH - RIGHT - 22 else "middle"
        edge = min(x(value) + 8, WIDTH) if anchor == "end" else x(value)
        yield f'<text class="{anchor}" x="{edge:.1f}" y="{HEIGHT - 7}">{escape(text)}</text>'


def _across(y: float, look: str) -> str:
    return f'<line class="{look}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _upright(x: float, look: str) -> str:
    return f'<line class="{look}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'


def _line(line: Series, x: Scale, y: Scale) -> Iterator[str]:
    steps, pen = [], "M"
    for at, value in line.points:
        if value is None:
            pen = "M"
            continue
        steps.append(f"{pen}{x(at):.1f} {y(value):.1f}")
        pen = "L"
    yield f'<path class="{line.look} line" d="{"".join(steps)}"/>'
    if len(steps) <= 60:  # more would be a band
        yield f'<path class="{line.look.split()[0]} points" d="{_spots(line, x, y)}"/>'


def _spots(line: Series, x: Scale, y: Scale) -> str:
    return "".join(f"M{x(at):.1f} {y(value):.1f}h0" for at, value in line.points if value is not None)


def _band(line: Series, x: Scale, y: Scale) -> str:
    over = [f"{x(at):.1f} {y(high):.1f}" for at, _, high in line.band]
    under = [f"{x(at):.1f} {y(low):.1f}" for at, low, _ in reversed(line.band)]
    return f'<path class="{line.look} band" d="M{"L".join(over + under)}Z"/>'


def _stars(series: Sequence[Series], best: int, x: Scale, y: Scale) -> list[str]:
    """The first series at the best step."""
    found = [value for at, value in series[0].points if at == best and value is not None]
    return [_star(x(best), y(value)) for value in found[:1]]


def _star(x: float, y: float) -> str:
    corners = []
    for i in range(10):
        radius, angle = (8.0, 3.4)[i % 2], math.pi * (i / 5 - 0.5)
        corners.append(f"{x + radius * math.cos(angle):.1f},{y + radius * math.sin(angle):.1f}")
    return f'<polygon class="star" points="{" ".join(corners)}"/>'


def _tips(series: Sequence[Series], x: Scale, x_name: str) -> Iterator[str]:
    """For each step a column that shows its values while the pointer is over it."""
    by_x: dict[float, list[tuple[Series, float]]] = {}
    for line in series:
        for at, value in line.points:
            if value is not None:
                by_x.setdefault(at, []).append((line, value))
    every = max(1, math.ceil(len(by_x) / MOST_TIPS))
    shown = sorted(by_x)[::every]
    middles = [x(value) for value in shown]
    edges = [LEFT, *((a + b) / 2 for a, b in itertools.pairwise(middles)), WIDTH - RIGHT]
    for value, middle, (start, stop) in zip(shown, middles, itertools.pairwise(edges), strict=True):
        column = f'x="{start:.1f}" y="{TOP}" width="{stop - start:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        lines = [f"{x_name} {short(value)}", *(f"{shorten(line.name)}  {exact(v)}" for line, v in by_x[value][:12])]
        yield f'<rect class="at" {column}/>{_tip(middle, lines)}'


def _tip(x: float, lines: Sequence[str]) -> str:
    width, height = CHARACTER * max(map(len, lines)) + 16, 15.0 * len(lines) + 8
    left = x + 10 if x + 10 + width < WIDTH else max(x - 10 - width, 0.0)
    rows = "".join(
        f'<text x="{left + 8:.1f}" y="{TOP + 16 + 15 * i:.0f}">{escape(text)}</text>' for i, text in enumerate(lines)
    )
    box = f'<rect x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{height:.0f}" rx="5"/>'
    return f'<g class="tip">{_upright(x, "at-x")}{box}{rows}</g>'


@dataclass(frozen=True)
class Strip:
    """The encodings of one class: five numbers, and single values where they are known."""

    name: str
    look: str
    count: int | None
    low: float
    q1: float
    mean: float
    q3: float
    high: float
    values: Sequence[float] = ()


def strip_chart(title: str, note: str, strips: Sequence[Strip]) -> str:
    """One row per class on a common axis: whisker from lowest to highest, box from quartile to quartile, mean, dots."""
    edge = max([1.0, *(max(abs(strip.low), abs(strip.high)) for strip in strips)])
    x = Scale(-edge, edge, 18.0, WIDTH - 18.0)
    height = ROW * len(strips) + 26
    body = []
    for value in round_numbers(-edge, edge):
        look = "zero" if value == 0 else "grid"
        body.append(f'<line class="{look}" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="4" y2="{height - 24}"/>')
        body.append(f'<text class="middle" x="{x(value):.1f}" y="{height - 7}">{short(value)}</text>')
    for row, strip in enumerate(strips):
        body += _strip(strip, ROW * row, x)
    return panel(title, f'<span class="note">{escape(note)}</span>', _svg(height, title, body))


def _strip(strip: Strip, top: float, x: Scale) -> Iterator[str]:
    middle, facts = top + 36, f"mean {strip.mean:+.3f}".replace("-", "−")
    facts += "" if strip.count is None else f" · {strip.count} rows"
    yield f'<text class="name" x="24" y="{top + 15}">{escape(shorten(strip.name))}</text>'
    yield f'<text class="end" x="{WIDTH - 24}" y="{top + 15}">{facts}</text>'
    every = max(1, math.ceil(len(strip.values) / MOST_DOTS))
    # Values saturate at +-1: the golden ratio spreads equal ones evenly over the height, the same on every day.
    spots = [(value, (i * 0.618034) % 1.0 - 0.5) for i, value in enumerate(sorted(strip.values)[::every])]
    dots = "".join(f"M{x(value):.1f} {middle + 22 * share:.1f}h0" for value, share in spots)
    yield f'<path class="{strip.look} dots" d="{dots}"/>' if dots else ""
    yield f'<g class="{strip.look}"><title>{escape(_numbers(strip))}</title>'
    yield f'<line class="whisker" x1="{x(strip.low):.1f}" x2="{x(strip.high):.1f}" y1="{middle}" y2="{middle}"/>'
    width = max(x(strip.q3) - x(strip.q1), 1.5)
    yield f'<rect class="box" x="{x(strip.q1):.1f}" y="{middle - 11}" width="{width:.1f}" height="22" rx="2"/>'
    yield f'<path class="mean" d="M{x(strip.mean):.1f} {middle - 11}v22"/></g>'


def _numbers(strip: Strip) -> str:
    ends = f"lowest {strip.low:.4f}, quartiles {strip.q1:.4f} and {strip.q3:.4f}, highest {strip.high:.4f}"
    return f"{strip.name}: mean {strip.mean:.4f}, {ends}"


def split_bar(title: str, parts: Sequence[tuple[str, str, float]]) -> str:
    """A bar cut into (name, look, share), for as wide as the page is."""
    body, start = [], 0.0
    for name, look, share in parts:
        where = f'x="{100 * start:.2f}" width="{100 * share:.2f}" height="10"'
        body.append(f'<rect class="{look} bar" {where}><title>{escape(name)}: {share:.1%}</title></rect>')
        start += share
    view = 'viewBox="0 0 100 10" preserveAspectRatio="none"'
    return f'<svg class="split" {view} role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'


def share_bar(share: float, look: str = POSITIVE) -> str:
    """A bar as long as a share of the cell that it stands in."""
    track = '<rect class="track" width="100" height="10" rx="1"/>'
    bar = f'<rect class="{look} bar" width="{100 * min(max(share, 0.0), 1.0):.2f}" height="10"/>'
    return f'<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{track}{bar}</svg>'


def panel(title: str, legend: str, content: str) -> str:
    caption = f"<figcaption><b>{escape(title)}</b><span>{legend}</span></figcaption>"
    return f'<figure class="panel">{caption}{content}</figure>'


def _legend(series: Sequence[Series]) -> str:
    plain = len(series) == 1 and not series[0].band
    return "" if plain else "".join(_key(f"{line.look} line", line.name) for line in series)


def _key(look: str, name: str) -> str:
    sample = f'<svg viewBox="0 0 24 12" aria-hidden="true"><line class="{look}" x1="1" x2="23" y1="6" y2="6"/></svg>'
    return f'<span class="key">{sample}{escape(shorten(name))}</span>'


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    view = f'viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    return f'<svg class="chart" {view} role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
