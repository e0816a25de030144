"""Messages between ranks: what is sent arrives as it was, and what a stranger sends runs nothing."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from gradiend_dist.distributed import meetings
from gradiend_dist.distributed.comm import Comm
from gradiend_dist.distributed.messages import LENGTH, MOST_BYTES, MessageError, check_length, decode, encode
from gradiend_dist.space import ParameterSpace
from gradiend_dist.training.seeds import SeedResult, Verdict
from gradiend_dist.training.spectral import ClosedForm

SOURCES = Path(meetings.__file__).parent

VALUES: list[Any] = [
    None, True, 0, -(10**40), 1e-320, 0.1 + 0.2, math.inf, "", "ä\n→", [], [1, [2.5, None]], (), (1, ("a",)),
    {}, {"a": {"b": (1,)}}, {1: "one", 2.5: "more", (1, 2): "pair"}, {"$tuple": [1]}, {"$x": 1, "y": 2}, {1, 2},
    frozenset({"a"}), Path("/a/b"), [Path("x")],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_message__plain_value_arrives_as_it_was(value: Any) -> None:
    arrived = decode(encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T, torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 3),
        torch.tensor([True, False]), torch.arange(5, dtype=torch.int32), torch.tensor([math.nan, -0.0]),
    ],
    ids=str,
)  # fmt: skip
def test_message__tensor_arrives_to_the_bit_and_may_be_changed(tensor: torch.Tensor) -> None:
    arrived, after = decode(encode([tensor, torch.ones(3)]))
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    torch.testing.assert_close(arrived, tensor, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(after, torch.ones(3))
    arrived.zero_()


def test_message__arrays_frames_and_our_own_classes_arrive() -> None:
    array = np.array([[1.5, math.nan], [0.1, -0.0]])
    np.testing.assert_array_equal(decode(encode(array)), array)
    frame = pd.DataFrame({"text": ["a", "b"], "label": [1.0, math.nan], "count": [1, 2], "fine": [True, False]})
    pd.testing.assert_frame_equal(decode(encode({"encoder_df": frame}))["encoder_df"], frame)
    space = ParameterSpace([("a", (2, 3), torch.tensor([0, 4])), ("b", (5,), None)])
    assert decode(encode(("architecture", space)))[1].fingerprint() == space.fingerprint()
    result = SeedResult(1, Path("x"), {"losses": [0.1]}, True, Verdict(True, 0.5, None, ""), 0.25)
    assert decode(encode([result])) == [result]
    form = ClosedForm(torch.ones(1, 2), None, None, None, {"gap": 2.0})
    arrived = decode(encode(form))
    assert torch.equal(arrived.encoder, form.encoder) and arrived.facts == form.facts


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def forged(header: Any, buffers: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(LENGTH, "little") + text + buffers


def test_message__pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    for message in (pickle.dumps(Evil(tmp_path / "mark")), forged({"$object": ["Evil", {}]})):
        with pytest.raises(MessageError):
            decode(message)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "message",
    [
        b"", b"\xff" * 20, forged({"$object": ["Path", {}]}), forged({"$object": ["SeedResult", {"nonsense": 1}]}),
        forged({"$tensor": ["float32", [10**12], 0]}), forged({"$tensor": ["float32", [1], -4]}, b"1234"),
        forged({"$array": ["|O8", [1], 0]}, b"12345678"), forged({"$frame": [["a", "category", [1]]]}),
        forged({"$unknown": 1}), forged({"$tuple": 5}), (99).to_bytes(LENGTH, "little") + b"[" * 99,
    ],
    ids=lambda message: repr(message[:24]),
)  # fmt: skip
def test_message__of_a_stranger_is_one_error(message: bytes) -> None:
    with pytest.raises(MessageError, match="cannot be read"):
        decode(message)


@pytest.mark.parametrize("length", [-1, MOST_BYTES + 1, 2**62])
def test_message__of_an_invented_length_takes_no_memory(length: int) -> None:
    with pytest.raises(MessageError, match="at most"):
        check_length(length)


def test_message__of_what_has_no_plain_form_is_found_by_the_sender() -> None:
    with pytest.raises(AssertionError, match="Evil has no form"):
        encode([Evil(Path("x"))])


def test_distributed__unpickles_nothing() -> None:
    """Neither itself nor by those functions of torch that do it for their callers."""
    for path in SOURCES.glob("*.py"):
        text = path.read_text()
        for name in ("import pickle", "object_list", "all_gather_object", "gather_object"):
            assert name not in text, f"{path.name} uses {name}"


def test_store_of_rank_0__listens_on_one_interface() -> None:
    """Fails if it listens on all of them, as torch's own do."""
    store = meetings.store_of_rank_0(Comm())
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert {each.ip for each in listening if each.port == store.port} == {"127.0.0.1"}
    store.set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (["127.0.1.1", "10.0.0.5"], "10.0.0.5"), (["10.0.0.5", "10.0.0.5"], "10.0.0.5"),
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"), (["::1", "fe80::2%eth0"], "fe80::2%eth0"),
    ],
)  # fmt: skip
def test_store_of_rank_0__has_the_address_that_other_hosts_know(
    monkeypatch: pytest.MonkeyPatch, known: list[str], chosen: str
) -> None:
    """Debian takes a host's own name for 127.0.1.1: who listens there is reached by nobody else."""
    monkeypatch.setattr(Comm, "gather", lambda _self, _value: known)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert meetings._address_of_rank_0(Comm(world_size=2)) == chosen
