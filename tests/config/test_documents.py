"""Documents that others wrote: read as plain values, or refused in one line and in bounded time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradiend_dist.config.documents import MOST_LEVELS, DocumentError, parse_json, parse_yaml, read_text

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)

YAML = [
    ("alias in itself", "a: &a [*a]", "alias 'a' stands inside"),
    ("alias in its mapping", "&a {x: *a}", "alias 'a' stands inside"),
    ("alias bomb", BOMB, "more than 100000 values"),
    ("deep list", "[" * 100_000, f"more than {MOST_LEVELS} levels"),
    ("deep block", "- " * 60_000, f"more than {MOST_LEVELS} levels"),
    ("deep mapping", "{a: " * 3000, f"more than {MOST_LEVELS} levels"),
    ("huge integer", "a: " + "9" * 5000, "cannot be read"),
    ("empty integer", "a: !!int ''", "cannot be read"),
    ("switch that is none", "a: !!bool x", "cannot be read"),
    ("time that is none", "a: !!timestamp x", "cannot be read"),
    ("code", "!!python/object/apply:os.system [id]", "tag"),
    ("key twice", "a: 1\nb: 2\na: 3", "'a' stands twice"),
    ("key twice, deeper", "p: {topk: 1, topk: 2}", "'topk' stands twice"),
    ("list as key", "? [1, 2]\n: 3", "unhashable"),
    ("half a character", 'a: "\\ud800"', "cannot be written"),
    ("NUL", 'a: "\\0"', "cannot be written"),
    ("two documents", "a: 1\n---\nb: 2", "single document"),
]

JSON = [
    ("deep", "[" * 100_000, f"more than {MOST_LEVELS} levels"),
    ("deep enough for Python", '{"a":' * 60 + "1" + "}" * 60, f"more than {MOST_LEVELS} levels"),
    ("huge integer", "9" * 5000, "digits"),
    ("key twice", '{"a": 1, "a": 2}', "'a' stands twice"),
    ("half a character", '{"a": "\\ud800"}', "cannot be written"),
    ("nothing", "", "Expecting value"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("text", "says"), [case[1:] for case in YAML], ids=[case[0] for case in YAML])
def test_yaml__is_refused_in_one_line_and_in_bounded_time(text: str, says: str) -> None:
    with pytest.raises(DocumentError, match=says) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("text", "says"), [case[1:] for case in JSON], ids=[case[0] for case in JSON])
def test_json__is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(DocumentError, match=says):
        parse_json(text)


def test_yaml__of_a_configuration_is_what_it_was() -> None:
    """Anchors, merged mappings (also overridden ones) and dates as texts; a bound must not hit an honest file."""
    text = """
    base: &base {topk: 0.1, source: diff}
    one: &one {<<: *base, topk: 0.2}
    two: {<<: *one}
    same: [*base, *base]
    day: 2026-01-31
    no_day: 2001-99-99
    number: 1.5
    """
    base = {"topk": 0.1, "source": "diff"}
    assert parse_yaml(text) == {
        "base": base,
        "one": {"topk": 0.2, "source": "diff"},
        "two": {"topk": 0.2, "source": "diff"},
        "same": [base, base],
        "day": "2026-01-31",
        "no_day": "2001-99-99",
        "number": 1.5,
    }


@pytest.mark.timeout(20)
def test_read_text__takes_regular_files_of_a_bounded_size(tmp_path: Path) -> None:
    """Nobody writes into the pipe: whoever opens it waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("x" * 101)
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, says in (
        ("pipe", "regular"),
        ("/dev/zero", "regular"),
        ("large", "101 bytes"),
        ("bytes", "utf-8"),
        ("no", "No such"),
    ):
        with pytest.raises(DocumentError, match=says):
            read_text(tmp_path / name, 100)
