"""docs/arguments.md is what the dataclasses say."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from gradiend_dist import PostPruneConfig, PrePruneConfig, TextPredictionConfig, TrainingArguments
from gradiend_dist.commands.arguments_page import page
from gradiend_dist.config.checks import choices_of

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"

KINDS = (TrainingArguments, TextPredictionConfig, PrePruneConfig, PostPruneConfig)


def test_page__is_made_from_the_code_as_it_is() -> None:
    """Fails when an argument, its default or its docstring changed and the page did not."""
    stale = "run: python -m gradiend_dist.commands.arguments_page > docs/arguments.md"
    assert PAGE.read_text(encoding="utf-8") == page(), stale


@pytest.mark.parametrize("kind", KINDS)
def test_page__has_every_argument(kind: type) -> None:
    text = page()
    for item in dataclasses.fields(kind):
        assert f"| `{item.name}`" in text, item.name


@pytest.mark.parametrize("kind", KINDS)
def test_docstring__names_every_choice(kind: type) -> None:
    """The type says what may be chosen, the docstring what it means: fails when only one of them was extended."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        for choice in choices_of(hints[item.name]):
            assert choice in item.metadata["help"], f"{item.name}: {choice}"
