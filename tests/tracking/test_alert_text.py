"""Alerts as a log shows them: what was observed, and a remedy with the measured value in its place."""

from __future__ import annotations

import pytest

from gradiend_dist.tracking.alerts import ALERTS, alert_text


@pytest.mark.parametrize("kind", sorted(ALERTS))
def test_alert_text__names_the_measured_value_and_has_no_place_left(kind):
    text = alert_text(kind, "something was seen", clip=0.0321)
    assert text.startswith("something was seen: ") and "`" not in text and "{" not in text
    assert ("0.03" in text) == ("{clip}" in ALERTS[kind].remedy)
