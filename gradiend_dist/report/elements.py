"""Numbers and texts as a reader meets them, and the small parts of a page that are made of them."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence

from gradiend_dist.storage.files import jsonable

LONGEST_NAME = 28


def escape(value: object) -> str:
    """Text from a file, safe inside an element or a quoted attribute, and always possible to write as UTF-8."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)


def shorten(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def short(value: float) -> str:
    """At most four digits, as an axis shows them: 0.05, 1.3e-5, 12k."""
    if value and not 1e-3 <= abs(value) < 1e7:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    if abs(value) >= 1e4:
        thousands, unit = (value / 1e6, "M") if abs(value) >= 1e6 else (value / 1e3, "k")
        return f"{thousands:.4g}{unit}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def exact(value: float) -> str:
    """Four decimals, where a number has them."""
    return f"{value:.4f}".replace("-", "−") if value == 0 or 1e-3 <= abs(value) < 1e3 else short(value)


def shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False)


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.3g} %"


def whole_percent(share: float) -> str:
    return f"{round(100 * share)} %".replace("-", "−") if share >= -9.99 else "< −999 %"


def duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def tile(name: str, value: str, more: str | None = None) -> str:
    below = "" if more is None else f"<i>{escape(more)}</i>"
    return f'<div class="tile"><span>{name}</span><b>{escape(value)}</b>{below}</div>'


def dotted(name: str, look: str) -> str:
    """A name behind a dot in its colour."""
    return f'<span class="{look} dot"></span>{escape(name)}'


def missing(text: str, command: str = "") -> str:
    code = f" <code>{escape(command)}</code>." if command else ""
    return f'<p class="missing">{escape(text)}{code}</p>'


def table(names: Sequence[str], rows: Iterable[Sequence[str]], look: str = "") -> str:
    """Cells are HTML already; the first column names a row, the others are numbers."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{look}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
