"""The driver, with few tries of a fixed seed; `make test-chaos` has more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

DRIVER = Path(__file__).parent / "driver.py"


@pytest.mark.parametrize("options", [("--tries", "30"), ("--tries", "5", "--real")], ids=["forked", "real launcher"])
def test_signals__lose_nothing_hang_nothing_and_change_nothing(options: tuple[str, ...]) -> None:
    command = [sys.executable, str(DRIVER), "--seed", os.environ.get("CHAOS_SEED", "0"), *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    print(ended.stdout[-6000:], ended.stderr[-3000:])
    assert ended.returncode == 0
