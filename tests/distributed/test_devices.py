"""Where encoder, decoder and base model go: the documented table, and what a user may override."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from gradiend_dist.distributed.devices import gpu_utilisation, peak_memory, place
from gradiend_dist.errors import UserError

TABLE = {
    0: ("cpu", "cpu", "cpu"),
    1: ("cuda:0", "cuda:0", "cuda:0"),
    2: ("cuda:0", "cuda:1", "cuda:0"),
    3: ("cuda:0", "cuda:1", "cuda:2"),
    4: ("cuda:0", "cuda:1", "cuda:2"),
    8: ("cuda:0", "cuda:1", "cuda:2"),
}


def devices(num_gpus: int, **options: object) -> tuple[str, str, str]:
    found = place(num_gpus, **options)  # type: ignore[arg-type]
    return str(found.encoder), str(found.decoder), str(found.base_model)


@pytest.mark.parametrize("num_gpus", TABLE)
def test_place__follows_the_documented_table(num_gpus):
    assert devices(num_gpus) == TABLE[num_gpus]


@pytest.mark.parametrize("num_gpus", TABLE)
def test_place__keeps_encoder_and_decoder_together_where_asked(num_gpus):
    expected = ("cuda:0", "cuda:0", "cuda:1") if num_gpus > 1 else TABLE[num_gpus]
    assert devices(num_gpus, encoder_decoder_same_device=True) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cpu"}, ("cpu", "cpu", "cpu")),
        ({"device": "cuda:3"}, ("cuda:3", "cuda:3", "cuda:3")),
        ({"device_encoder": "cuda:3"}, ("cuda:3", "cuda:1", "cuda:2")),
        ({"device_decoder": "cpu"}, ("cuda:0", "cpu", "cuda:2")),
        ({"device_base_model": "cuda:1"}, ("cuda:0", "cuda:1", "cuda:1")),
        ({"device": "cpu", "device_base_model": "cuda:3"}, ("cpu", "cpu", "cuda:3")),
        ({"device_decoder": "cuda:3", "encoder_decoder_same_device": True}, ("cuda:0", "cuda:3", "cuda:1")),
    ],
)
def test_place__explicit_devices_win_over_device_and_device_over_the_table(options, expected):
    assert devices(4, **options) == expected


@pytest.mark.parametrize("name", ["device_encoder", "device_decoder", "device_base_model"])
@pytest.mark.parametrize(("num_gpus", "value"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
def test_place__a_gpu_that_is_not_there_is_named(name, num_gpus, value):
    with pytest.raises(UserError, match=f"{name}={value} does not exist, this machine shows {num_gpus} GPUs"):
        place(num_gpus, **{name: value})


@pytest.mark.parametrize("value", ["gnu", "cuda:x", "cuda:-1"])
def test_place__what_is_no_device_is_named(value):
    with pytest.raises(UserError, match=f"device_encoder={value} is not a device"):
        place(2, device_encoder=value)


@pytest.mark.parametrize("value", ["cuda:7", "gpu"])
def test_place__a_wrong_device_for_all_is_named_as_device(value):
    """Fails if the message names an argument that the user did not pass."""
    with pytest.raises(UserError, match=f"^device={value}"):
        place(2, device=value)


def test_place__says_what_is_where():
    assert str(place(3)) == "encoder on cuda:0, decoder on cuda:1, base model on cuda:2"


def test_utilisation__is_none_without_a_gpu_or_without_what_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's call, which asks NVIDIA's library."""
    assert gpu_utilisation(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 87)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert gpu_utilisation(torch.device("cuda:0")) is None

    class NVMLError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError))
    assert gpu_utilisation(torch.device("cuda:0")) == 87.0

    def not_supported(device: torch.device) -> int:
        raise NVMLError(f"{device} is a slice")

    monkeypatch.setattr(torch.cuda, "utilization", not_supported)
    assert gpu_utilisation(torch.device("cuda:0")) is None


def test_peak_memory__is_what_the_process_has_held() -> None:
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(50_000_000)
    assert peak_memory(torch.device("cpu")) - before > 0.5 * held.nbytes or before > 10 * held.nbytes
