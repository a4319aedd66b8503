"""Pauses, refusals and bounds of the exporter."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.agent.sink import Sink
from tula_agent.guard import GIVE_UP_AFTER, Guard
from tula_agent.ship.envelope import Envelope
from tula_agent.ship.exporter import LONGEST_PAUSE_S, Exporter, backoff_s
from tula_agent.ship.spool import read_records
from tula_agent.ship.transport import Transport, retry_after_s


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_grow_and_stay_bounded(failures: int, jitter: float) -> None:
    assert 0 < backoff_s(failures, jitter) <= LONGEST_PAUSE_S
    assert backoff_s(failures, jitter) <= backoff_s(failures + 1, jitter)


@given(st.text(max_size=20))
def test_a_retry_after_of_any_text_is_bounded(header: str) -> None:
    value = retry_after_s(header)
    assert value is None or 0 <= value <= 300


def test_a_retry_after_is_honoured() -> None:
    assert retry_after_s("7") == 7
    assert retry_after_s("100000") == 300
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") is None
    assert retry_after_s(None) is None


def test_a_queue_over_its_bound_goes_to_disk_oldest_first(tmp_path: Path) -> None:
    exporter = Exporter(
        lambda: Transport("http://127.0.0.1:9", None, 1.0),
        lambda _last: [],
        tmp_path / "a.spool",
        guard=Guard(),
        queue_limit_bytes=250,
        spool_limit_bytes=1200,
    )
    for number in range(20):
        exporter.put(Envelope("POST", "/v1/runs/r/samples", b"%0100d" % number, values=7))
    on_disk = [int(envelope.body) for envelope in read_records(tmp_path / "a.spool")]
    assert on_disk == list(range(len(on_disk)))
    assert len(on_disk) >= 4
    assert exporter.dropped == 7 * (20 - 2 - len(on_disk))


def test_a_token_goes_in_the_header_and_never_into_the_spool(sink: Sink, tmp_path: Path) -> None:
    transport = Transport(sink.url, "secret-token", 5.0)
    exporter = Exporter(lambda: transport, lambda _last: [], tmp_path / "a.spool", guard=Guard())
    sink.behaviour = "error"
    exporter.put(Envelope("PATCH", "/v1/runs/r", b'{"state": "running"}'))
    exporter.close(3.0, [])
    assert b"secret-token" not in (tmp_path / "a.spool").read_bytes()
    assert len(sink.seen) >= 1


def test_a_part_that_keeps_failing_is_given_up_and_others_go_on(caplog) -> None:
    guard = Guard()
    for _ in range(GIVE_UP_AFTER):
        assert guard.works("memory")
        with guard("memory"):
            raise ValueError("no")
    assert not guard.works("memory")
    assert guard.works("gradients")
    assert [record.message.split(" failed")[0] for record in caplog.records] == ["memory", "memory"]
