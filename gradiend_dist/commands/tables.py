"""Tables and percentages for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def percent(share: float) -> str:
    """A decoder that was not trained may be wrong by any factor: how far below zero it is says nothing more."""
    return f"{round(100 * share)} %" if share >= -9.99 else "< -999 %"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
