"""Pauses, refusals and bounds of the exporter."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.agent.sink import Sink
from tula_agent.config import read_config
from tula_agent.guard import GIVE_UP_AFTER, Guard
from tula_agent.out_of_memory import OutOfMemoryWatch
from tula_agent.recorder import Recorder
from tula_agent.session import Run
from tula_agent.ship.envelope import Envelope
from tula_agent.ship.exporter import LONGEST_PAUSE_S, TRIES_BEFORE_OPEN, Exporter, backoff_s
from tula_agent.ship.spool import read_records
from tula_agent.ship.transport import Reply, Transport, retry_after_s


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


class Service:
    """In place of the transport: fails until it is told otherwise, and keeps what it was sent."""

    def __init__(self) -> None:
        self.up = False
        self.tries: list[Envelope] = []
        self.taken: list[Envelope] = []

    def send(self, envelope: Envelope) -> Reply:
        self.tries.append(envelope)
        if not self.up:
            return Reply("retry", 503, retry_after_s=0.0, detail="down")
        self.taken.append(envelope)
        return Reply("delivered", 200, {})

    def close(self) -> None:
        pass


def test_a_service_that_is_down_is_asked_a_few_times_then_left_alone_and_gets_all_in_order_afterwards(
    tmp_path: Path,
) -> None:
    service = Service()
    exporter = Exporter(lambda: service, lambda _last: [], tmp_path / "a.spool", guard=Guard())  # type: ignore[arg-type]
    everything = [Envelope("POST", "/v1/runs/r/samples", b"%d" % number, values=1) for number in range(40)]
    for envelope in everything:
        exporter.put(envelope)
    exporter._deliver(False)
    assert len(service.tries) == TRIES_BEFORE_OPEN
    exporter._deliver(
        False
    )  # the circuit is open: what waits goes to disk, and nobody is asked before the pause is over
    assert len(service.tries) == TRIES_BEFORE_OPEN
    assert len(list(read_records(tmp_path / "a.spool"))) == 40
    exporter._not_before = 0.0  # it is over
    exporter._deliver(False)
    assert len(service.tries) == TRIES_BEFORE_OPEN + 1  # one request asks whether the service is back
    service.up, exporter._not_before = True, 0.0
    exporter._deliver(False)
    assert service.taken == everything
    assert exporter.dropped == 0
    assert not (tmp_path / "a.spool").exists()


def test_a_pause_that_the_service_asks_for_is_kept(tmp_path: Path) -> None:
    service = Service()
    service.send = lambda _envelope: Reply("retry", 429, retry_after_s=120.0)  # type: ignore[method-assign]
    exporter = Exporter(lambda: service, lambda _last: [], tmp_path / "a.spool", guard=Guard())  # type: ignore[arg-type]
    exporter.put(Envelope("POST", "/v1/runs/r/samples", b"1"))
    exporter._deliver(False)
    assert exporter._not_before > time.monotonic() + 100


def test_what_was_dropped_is_reported_with_the_end_of_the_run(sink: Sink, tmp_path: Path) -> None:
    config = read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)})
    assert config is not None
    recorder = Recorder(replace(config, row_limit=3), Guard())
    for value in range(10):
        recorder.log({"loss": float(value)})
    recorder.finish("succeeded")
    assert sink.bodies("/v1/runs/r")[-1]["dropped"] == 10 - 3
    assert not sink.invalid


class Stuck:
    """What never answers: a store whose host is gone, a disk that hangs."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def __call__(self, *_arguments: object) -> bool:
        self.asked.set()
        self.released.wait(60)
        return False


def test_one_deadline_holds_for_all_that_is_waited_for_at_the_end(sink: Sink, tmp_path: Path) -> None:
    """The service, the other ranks' store and the disk all hang: together they cost what one of them may."""
    sink.behaviour = "hang"
    config = read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)})
    assert config is not None
    run = Run(replace(config, exit_deadline_s=1.0))
    recorder, store, disk = run.recorder, Stuck(), Stuck()
    assert recorder is not None
    recorder.exporter._spool.append = disk  # type: ignore[method-assign]
    run._memory_watch = OutOfMemoryWatch(
        store, rank=0, report=lambda *_: None, batch_size=lambda: None, look_every_s=0.001
    )
    run._memory_watch.start()
    assert store.asked.wait(10)
    began = time.monotonic()
    run.finish()
    took = time.monotonic() - began
    assert disk.asked.is_set()
    store.released.set()
    disk.released.set()
    assert took < 2.5  # each by itself would have taken its five seconds, or for ever


def test_where_python_starts_no_more_threads_what_is_left_goes_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 refuses them once it ends, which is when most runs are closed."""
    last, rows = (Envelope("PATCH", "/v1/runs/r", b"{}"), Envelope("POST", "/v1/runs/r/samples", b"[]", 1))
    exporter = Exporter(lambda: Service(), lambda _last: [rows], tmp_path / "a.spool", guard=Guard())  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(exporter, "_started", lambda _thread: False)
    exporter.close(5.0, [last])
    assert list(read_records(tmp_path / "a.spool")) == [rows, last]
