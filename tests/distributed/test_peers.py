"""Who tells of a lost rank."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from gradiend_dist.distributed import peers
from gradiend_dist.distributed.peers import PeerLost, Peers


def test_loss__is_told_once_however_late_a_rank_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the lowest rank speaks after another one, which did not know that it is alive, has spoken."""
    monkeypatch.setattr(peers, "LAST_WORDS_SECONDS", 0.0)
    store = HashStore()
    told = Peers(1, 3, store).describe_loss(PeerLost("a sum"))
    assert told is not None and "rank 0, 2 is gone" in told
    assert Peers(0, 3, store).describe_loss(PeerLost("a sum")) is None
