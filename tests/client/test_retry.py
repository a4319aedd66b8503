"""Tests that the retry policy is bounded, and does not repeat a request that may have taken effect."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_client import NO_RETRY, RetryPolicy
from tula_client._request import Answer, worth_repeating
from tula_wire.retry import retry_after_s

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 6),
    base_s=st.floats(0.01, 1),
    cap_s=st.floats(0.01, 10),
    budget_s=st.floats(0, 60),
)


def answered(status: int) -> Answer:
    return Answer(status, {}, b"")


@given(policies, st.none() | st.floats(0, 100), st.lists(st.floats(0, 1, exclude_max=True), min_size=8, max_size=8))
def test_waits_stay_within_the_budget_and_attempts_within_their_number(
    policy: RetryPolicy, asked_s: float | None, dice: list[float]
) -> None:
    waited, attempts = 0.0, 0
    for roll in dice:
        attempts += 1
        wait = policy.wait_s(attempt=attempts, waited_s=waited, asked_s=asked_s, dice=roll)
        if wait is None:
            break
        assert wait >= (asked_s or 0.0)
        assert wait <= (asked_s or 0.0) + policy.cap_s
        waited += wait
    assert attempts <= policy.max_attempts
    assert waited <= policy.budget_s


@pytest.mark.parametrize("received", [httpx.ReadTimeout("too late"), answered(502), answered(504)])
def test_a_request_that_may_be_processed_is_repeated_only_if_idempotent(
    received: Answer | httpx.TransportError,
) -> None:
    assert not worth_repeating(received, idempotent=False)
    assert worth_repeating(received, idempotent=True)


@pytest.mark.parametrize("received", [httpx.ConnectError("refused"), answered(429), answered(503)])
def test_a_request_that_was_not_processed_is_always_repeated(received: Answer | httpx.TransportError) -> None:
    assert worth_repeating(received, idempotent=False)
    assert RetryPolicy().wait_s(attempt=1, waited_s=0, asked_s=None, dice=0.0) == 0.0


@given(st.integers(400, 599).filter(lambda status: status not in (429, 502, 503, 504)), st.booleans())
def test_a_refusal_is_final(status: int, idempotent: bool) -> None:
    assert not worth_repeating(answered(status), idempotent=idempotent)


def test_no_retry_means_one_attempt() -> None:
    assert NO_RETRY.wait_s(attempt=1, waited_s=0, asked_s=None, dice=0.0) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("3", 3.0),
        (" 120 ", 120.0),
        ("soon", None),
        ("-1", None),
        ("nan", None),
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        (format_datetime(NOW + timedelta(seconds=90)), 90.0),
        (format_datetime(NOW - timedelta(seconds=90)), 0.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, NOW) == seconds


@given(st.text())
def test_no_retry_after_header_breaks_the_client(header: str) -> None:
    seconds = retry_after_s(header, NOW)
    assert seconds is None or seconds >= 0
