"""Tests that an exchange is bounded in time and size, whatever the service sends."""

from __future__ import annotations

import logging
import time
import tracemalloc

import httpx
import pytest

from tests.agent.liar import DELIVERIES, WITHIN_S, Liar, Lie, lying
from tula_agent.ship.transport import MAX_ANSWER_BYTES, Transport

TIMEOUT_S = 0.3


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_an_answer_that_no_service_gives_is_dropped_in_time(delivery: str) -> None:
    """The transport once limited neither the size of a response nor the time for all of its parts."""
    with lying(Liar({}, forever=delivery)) as liar:
        transport = Transport(liar.url, None, TIMEOUT_S)
        tracemalloc.start()
        began = time.monotonic()
        reply = transport.get("/v1/jobs/j/scaling")
        took_s, (_, most) = time.monotonic() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        transport.close()
    assert (reply.verdict, reply.body) == ("retry", None)
    assert took_s < TIMEOUT_S + WITHIN_S / 2
    assert most < 32 * MAX_ANSWER_BYTES


def test_a_connection_is_kept_and_its_deadline_begins_again_with_each_request() -> None:
    with lying(Liar({"/scaling": [Lie("late", "{}")] * 4})) as liar:
        transport = Transport(liar.url, None, 1.5)
        verdicts = []
        for _ in range(4):
            verdicts.append(transport.get("/v1/jobs/j/scaling").verdict)
            time.sleep(0.5)
        transport.close()
    assert verdicts == ["delivered"] * 4


@pytest.mark.parametrize("token", ["of-the\npod", "of-the\0pod"])
def test_a_token_that_no_header_can_hold_is_not_repeated_in_what_is_logged(token: str) -> None:
    with lying(Liar({})) as liar:
        transport = Transport(liar.url, None, TIMEOUT_S)
        reply = transport.exchange("POST", "/status", b"{}", {"authorization": f"Bearer {token}"})
        transport.close()
    assert reply.verdict == "retry"
    assert "the token" in reply.detail
    assert "of-the" not in reply.detail


def test_a_script_that_logs_at_info_does_not_see_the_requests_of_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    """With Ray's workers or `logging.basicConfig(level=INFO)`, httpx once printed a line for each request."""
    caplog.set_level(logging.INFO)
    with lying(Liar({"/scaling": [Lie("whole", "{}")] * 3})) as liar:
        transport = Transport(liar.url.replace("http:", "HTTP:"), None, 5.0)  # which httpx logs as http:
        assert transport.get("/v1/jobs/j/scaling").verdict == "delivered"
        assert not caplog.records
        httpx.get(f"{liar.url}/scaling")  # the script's, to a URL that begins like the service's
        transport.close()
    assert caplog.text.count("HTTP Request") == 1


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ((404, b"<h1>404</h1>"), "retry"),
        ((403, b'{"error": "denied by the proxy"}'), "retry"),
        ((404, b'{"type": "urn:tula:problem:not-found", "detail": "no run"}'), "refused"),
        ((429, b'{"type": "urn:tula:problem:too-many-requests"}'), "retry"),
    ],
)
def test_only_the_services_own_problem_documents_refuse_for_good(answer: tuple[int, bytes], verdict: str) -> None:
    """A proxy answers 404 or 403 while the service behind it is unavailable."""
    status, body = answer
    over = httpx.MockTransport(lambda _: httpx.Response(status, stream=httpx.ByteStream(body)))
    transport = Transport("http://tula.invalid", None, TIMEOUT_S, over=over)
    assert transport.get("/v1/runs/r").verdict == verdict
    transport.close()
