"""model.safetensors has the same bytes whoever writes it: one process, ranks together, or rank 0 for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks_script import FILES, flat_space, new_model, write_files
from safetensors.torch import load_file
from together import found, of_ranks

from gradiend_dist.distributed.comm import Comm

RANKS = [3, pytest.param(2, marks=pytest.mark.slow)]
NAMES = [f"{name}.safetensors" for name in FILES]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a single process."""
    directory = tmp_path_factory.mktemp("alone")
    write_files(Comm(), directory, interleaved=False)
    return directory


@pytest.mark.parametrize("name", FILES)
def test_write_weights__is_what_safetensors_reads(alone: Path, name: str) -> None:
    """Fails by a wrong offset, shape, dtype or order: all ranks could agree on those."""
    n, options = FILES[name]
    expected, read = new_model(flat_space(n), **options).state_dict(), load_file(alone / f"{name}.safetensors")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[key], tensor) and read[key].dtype == tensor.dtype for key, tensor in expected.items())


@pytest.mark.parametrize("how", ["even", "interleaved", "alone_0/out"])
@pytest.mark.parametrize("ranks", RANKS)
def test_write_weights__same_bytes_on_any_number_of_ranks(alone: Path, ranks: int, how: str) -> None:
    """Parts of one range or of many, on a file system that all ranks share or, through rank 0, on one that they do not.
    Fails if a rank leaves a gap, writes at another's place, or leaves its token behind."""
    directory = of_ranks(ranks) / how
    assert sorted(path.name for path in directory.iterdir()) == sorted(NAMES)
    differing = [name for name in NAMES if (directory / name).read_bytes() != (alone / name).read_bytes()]
    assert differing == []


@pytest.mark.parametrize("ranks", RANKS)
def test_read_weights__gives_each_rank_its_part(ranks: int) -> None:
    checks = {name: check for name, check in found(ranks, "weight_files").items() if name.startswith("read")}
    assert len(checks) == 5
    assert {name: check for name, check in checks.items() if not all(check.values())} == {}


@pytest.mark.parametrize("ranks", RANKS)
def test_not_shared__only_rank_0_has_files(ranks: int) -> None:
    """Else the test of the fallback would have tested the shared way."""
    assert found(ranks, "weight_files")["seen alone"] == [sorted(NAMES)] + [None] * (ranks - 1)
