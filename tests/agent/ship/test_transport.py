"""One exchange has bounds in time and size, whatever the service sends."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from tests.agent.liar import DELIVERIES, Liar, Lie, lying
from tula_agent.ship.transport import MAX_ANSWER_BYTES, Transport

TIMEOUT_S = 0.3


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_an_answer_that_no_service_gives_is_dropped_in_time(delivery: str) -> None:
    """F3: there was a limit neither on the size of an answer nor on the time of all its parts."""
    with lying(Liar({}, forever=delivery)) as liar:
        transport = Transport(liar.url, None, TIMEOUT_S)
        tracemalloc.start()
        began = time.monotonic()
        reply = transport.get("/v1/jobs/j/scaling")
        took_s, (_, most) = time.monotonic() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        transport.close()
    assert (reply.verdict, reply.body) == ("retry", None)
    assert took_s < TIMEOUT_S + 1.0
    assert most < 32 * MAX_ANSWER_BYTES


def test_a_connection_is_kept_and_its_deadline_begins_again_with_each_request() -> None:
    with lying(Liar({"/scaling": [Lie("late", "{}")] * 4})) as liar:
        transport = Transport(liar.url, None, TIMEOUT_S)
        verdicts = []
        for _ in range(4):
            verdicts.append(transport.get("/v1/jobs/j/scaling").verdict)
            time.sleep(0.15)
        transport.close()
    assert verdicts == ["delivered"] * 4
