"""Tests of limits as they are read, and of times as they are written."""

import re
from datetime import UTC, datetime

import pytest

from graftwork.platform.errors import ValidationFailed
from graftwork.platform.quotas.quota import Quota, go_duration, month_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9995, "1m0s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (3599.25, "59m59.25s"),
        (3600, "1h0m0s"),
        (90061, "25h1m1s"),
    ],
)
def test_durations_are_written_as_go_writes_them(seconds: float, text: str) -> None:
    """Durations have the form of OpenAI's headers, rounded up to milliseconds."""
    assert go_duration(seconds) == text
    assert re.fullmatch(r"(\d+h)?(\d+m)?\d+(\.\d+)?m?s", text)


def test_a_month_begins_at_midnight_in_utc() -> None:
    """A month starts at midnight in UTC, to the second."""
    march = datetime(2028, 3, 1, tzinfo=UTC).timestamp()

    assert month_of(march - 0.001) == "2028-02"
    assert month_of(march) == "2028-03"


@pytest.mark.parametrize("value", [-1, 1.5, "10", True, 2**53 + 1])
def test_a_limit_that_is_no_count_is_named(value: object) -> None:
    """A limit that is not a whole number from 0, or is unknown, is refused with its field."""
    for name in ("requests_per_minute", "requests_per_hour"):
        with pytest.raises(ValidationFailed) as caught:
            Quota.from_mapping({name: value})
        assert caught.value.param == name
