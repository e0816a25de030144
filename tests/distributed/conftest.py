"""Which files are collected decides what the one launch of three ranks is for; see together.py."""

from __future__ import annotations

import pytest
import together


def pytest_collection_finish(session: pytest.Session) -> None:
    together.COLLECTED.update(item.path.stem for item in session.items)
