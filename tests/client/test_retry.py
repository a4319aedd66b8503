"""The retry policy is a pure function: bounded, and it never repeats what may have been done."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_client import NO_RETRY, RetryPolicy
from tula_client._request import Outcome
from tula_wire.retry import retry_after_s

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
outcomes = st.one_of(
    st.builds(Outcome, status=st.integers(400, 599), retry_after_s=st.none() | st.floats(0, 100)),
    st.builds(Outcome, failure=st.sampled_from(["not_sent", "lost"])),
)
policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 6),
    base_s=st.floats(0.01, 1),
    cap_s=st.floats(0.01, 10),
    budget_s=st.floats(0, 60),
)


@given(policies, outcomes, st.booleans(), st.lists(st.floats(0, 1, exclude_max=True), min_size=8, max_size=8))
def test_waits_stay_within_the_budget_and_attempts_within_their_number(
    policy: RetryPolicy, outcome: Outcome, idempotent: bool, dice: list[float]
) -> None:
    waited, attempts = 0.0, 0
    for roll in dice:
        attempts += 1
        wait = policy.wait_s(outcome, attempt=attempts, waited_s=waited, idempotent=idempotent, dice=roll)
        if wait is None:
            break
        assert wait >= (outcome.retry_after_s or 0.0)
        assert wait <= (outcome.retry_after_s or 0.0) + policy.cap_s
        waited += wait
    assert attempts <= policy.max_attempts
    assert waited <= policy.budget_s


@pytest.mark.parametrize("outcome", [Outcome(failure="lost"), Outcome(status=502), Outcome(status=504)])
def test_a_request_that_may_be_processed_is_repeated_only_if_idempotent(outcome: Outcome) -> None:
    policy = RetryPolicy()
    assert policy.wait_s(outcome, attempt=1, waited_s=0, idempotent=False, dice=0.5) is None
    assert policy.wait_s(outcome, attempt=1, waited_s=0, idempotent=True, dice=0.5) is not None


@pytest.mark.parametrize("outcome", [Outcome(failure="not_sent"), Outcome(status=429), Outcome(status=503)])
def test_a_request_that_was_not_processed_is_always_repeated(outcome: Outcome) -> None:
    assert RetryPolicy().wait_s(outcome, attempt=1, waited_s=0, idempotent=False, dice=0.0) == 0.0


@given(st.integers(400, 599).filter(lambda status: status not in (429, 502, 503, 504)), st.booleans())
def test_a_refusal_is_final(status: int, idempotent: bool) -> None:
    wait = RetryPolicy().wait_s(Outcome(status=status), attempt=1, waited_s=0, idempotent=idempotent, dice=0.5)
    assert wait is None


def test_no_retry_means_one_attempt() -> None:
    assert NO_RETRY.wait_s(Outcome(status=503), attempt=1, waited_s=0, idempotent=True, dice=0.0) is None


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
