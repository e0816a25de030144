"""The cluster that the tests of the Slurm launcher share; without Slurm or root they are skipped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing, strictest_proctrack

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, fresh for this session; a test must leave both up and no job behind."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    # Not tmp_path: its parents are closed to others, which munged refuses.
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(directory, proctrack=strictest_proctrack(), kill_wait=10)  # clusters have 30
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(directory)
