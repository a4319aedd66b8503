"""Tests how the exporter waits, handles refusals and bounds its queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent.sink import Sink
from tula_agent.commands.upload import upload_spool
from tula_agent.config import read_config
from tula_agent.guard import GIVE_UP_AFTER, Guard
from tula_agent.oom_watch import OomWatch
from tula_agent.readings import take
from tula_agent.recorder import Recorder
from tula_agent.run import Run
from tula_agent.ship.exporter import LONGEST_PAUSE_S, TRIES_BEFORE_OPEN, Exporter
from tula_agent.ship.spool import Spool, SpooledRequest, read_records
from tula_agent.ship.transport import MAX_RETRY_AFTER_S, Reply, Transport
from tula_wire.samples import LEASE_HEADER


def test_a_queue_over_its_bound_goes_to_disk_oldest_first(tmp_path: Path) -> None:
    exporter = Exporter(
        lambda: Transport("http://127.0.0.1:9", None, 1.0),
        lambda _last: [],
        tmp_path / "a.spool",
        guard=Guard(),
        queue_limit=2,
        spool_limit_bytes=1200,
    )
    for number in range(20):
        exporter.put(SpooledRequest("POST", "/v1/runs/r/samples", b"%0100d" % number, values=7))
    on_disk = [int(request.body) for request in read_records(tmp_path / "a.spool")]
    assert on_disk == list(range(len(on_disk)))
    assert len(on_disk) >= 4
    assert exporter.dropped == 7 * (20 - 2 - len(on_disk))


class Shared(deque[int]):
    """A queue from which another thread removes the oldest entry right after its length is read."""

    def __len__(self) -> int:
        found = super().__len__()
        if found:
            self.popleft()
        return found


def test_a_queue_that_another_thread_takes_from_gives_what_is_left() -> None:
    assert take(Shared([1, 2, 3])) == [2, 3]


class Answers:
    """A connection that answers each request with the result of a function."""

    def __init__(self, answer: Callable[[SpooledRequest], Reply]) -> None:
        self.send = answer

    def close(self) -> None:
        """Do nothing, since no connection is open."""


def test_a_request_whose_sending_raises_waits_for_the_next_delivery(tmp_path: Path) -> None:
    sent: list[SpooledRequest] = []

    def answer(request: SpooledRequest) -> Reply:
        sent.append(request)
        if len(sent) == 1:
            raise RuntimeError("no library is without faults")
        return Reply("delivered", 202)

    connection: Any = Answers(answer)
    exporter = Exporter(lambda: connection, lambda _last: [], tmp_path / "a.spool", guard=Guard())
    items = [SpooledRequest("POST", "/v1/runs/r/samples", b'{"n": %d}' % n, 1) for n in range(2)]
    for item in items:
        exporter.put(item)
    with pytest.raises(RuntimeError):
        exporter.deliver()
    exporter.deliver()
    assert sent == [items[0], *items]


def test_a_request_written_to_disk_during_the_last_replay_stays_there(tmp_path: Path) -> None:
    """The service accepts the replayed request only after `close` has written the queue to disk."""
    items = [SpooledRequest("POST", "/v1/runs/r/samples", b'{"n": %d}' % n, 1) for n in range(2)]
    answered = threading.Event()

    def answer(_request: SpooledRequest) -> Reply:
        assert answered.wait(60)
        return Reply("delivered", 202)

    connection: Any = Answers(answer)
    exporter = Exporter(lambda: connection, lambda _last: [], tmp_path / "a.spool", guard=Guard(), queue_limit=0)
    exporter.put(items[0])
    exporter.queue_limit = 1
    exporter.put(items[1])
    others = threading.enumerate()
    exporter.close(0.5, list)
    started = [each for each in threading.enumerate() if each not in others]
    assert started
    answered.set()
    for thread in started:
        thread.join(60)
    assert items[1] in list(read_records(tmp_path / "a.spool"))


def test_a_token_goes_in_the_header_and_never_into_the_spool(sink: Sink, tmp_path: Path) -> None:
    transport = Transport(sink.url, "secret-token", 5.0)
    exporter = Exporter(lambda: transport, lambda _last: [], tmp_path / "a.spool", guard=Guard())
    sink.behaviour = "error"
    exporter.put(SpooledRequest("PATCH", "/v1/runs/r", b'{"state": "running"}'))
    exporter.close(3.0, list)
    assert b"secret-token" not in (tmp_path / "a.spool").read_bytes()
    assert len(sink.seen) >= 1


def test_what_waits_on_disk_is_uploaded_under_the_lease_that_it_was_measured_under(tmp_path: Path) -> None:
    """Another launch may have taken over the run; only the lease number lets the service refuse the old requests."""
    headers: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        headers.append(request.headers.get(LEASE_HEADER))
        return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

    def upload_later(lease: int | None) -> None:
        away = Transport("http://127.0.0.1:9", None, 1.0)
        exporter = Exporter(lambda: away, lambda _last: [], tmp_path / "a.spool", guard=Guard(), lease=lease)
        exporter.put(SpooledRequest("POST", "/v1/runs/r/samples", b"{}", 1))
        exporter.close(3.0, list)
        back = Transport("http://tula.invalid", None, 1.0, over=httpx.MockTransport(answer))
        assert upload_spool(tmp_path, back).requests == 1
        back.close()

    upload_later(3)
    upload_later(None)
    assert headers == ["3", None]


def test_a_part_that_keeps_failing_is_left_out_and_others_continue(caplog) -> None:
    guard = Guard()
    for _ in range(GIVE_UP_AFTER):
        assert guard.works("memory")
        with guard("memory"):
            raise ValueError("no")
    assert not guard.works("memory")
    assert guard.works("gradients")
    assert [record.message.split(" failed")[0] for record in caplog.records] == ["tula: memory", "tula: memory"]


class Service:
    """A stand-in for the transport that fails until `up` is set, and keeps all requests."""

    def __init__(self, retry_after_s: float = 0.0) -> None:
        self.up = False
        self.retry_after_s = retry_after_s
        self.tries: list[SpooledRequest] = []
        self.taken: list[SpooledRequest] = []

    def send(self, request: SpooledRequest) -> Reply:
        self.tries.append(request)
        if not self.up:
            return Reply("retry", 503, retry_after_s=self.retry_after_s, detail="down")
        self.taken.append(request)
        return Reply("delivered", 200, {})

    def close(self) -> None:
        pass


class Clock:
    """A clock that advances only when the test advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def exporter_to(service: Service, path: Path, clock: Clock) -> Exporter:
    return Exporter(lambda: service, lambda _last: [], path, guard=Guard(), clock=clock)  # type: ignore[arg-type,return-value]


def test_a_service_that_is_down_is_tried_a_few_times_and_gets_all_in_order_when_it_is_back(tmp_path: Path) -> None:
    service, clock = Service(), Clock()
    exporter = exporter_to(service, tmp_path / "a.spool", clock)
    everything = [SpooledRequest("POST", "/v1/runs/r/samples", b"%d" % number, values=1) for number in range(40)]
    for request in everything:
        exporter.put(request)
    exporter.deliver()
    assert len(service.tries) == TRIES_BEFORE_OPEN
    clock.now -= 1.0  # however short the random pause is, it is not over
    exporter.deliver()  # the circuit is open: the queue goes to disk, without a request
    assert len(service.tries) == TRIES_BEFORE_OPEN
    assert len(list(read_records(tmp_path / "a.spool"))) == 40
    clock.now += 1.0 + LONGEST_PAUSE_S
    exporter.deliver()
    assert len(service.tries) == TRIES_BEFORE_OPEN + 1  # one request probes whether the service is back
    service.up = True
    clock.now += LONGEST_PAUSE_S
    exporter.deliver()
    assert service.taken == everything
    assert exporter.dropped == 0
    assert not (tmp_path / "a.spool").exists()


def test_the_exporter_waits_as_long_as_the_service_asks(tmp_path: Path) -> None:
    service, clock = Service(retry_after_s=120.0), Clock()
    exporter = exporter_to(service, tmp_path / "a.spool", clock)
    exporter.put(SpooledRequest("POST", "/v1/runs/r/samples", b"1"))
    exporter.deliver()
    clock.now += 119.0
    exporter.deliver()
    assert len(service.tries) == 1
    clock.now += 2.0 + LONGEST_PAUSE_S
    exporter.deliver()
    assert len(service.tries) == 2


def test_a_pause_that_a_service_asks_for_is_bounded(sink: Sink) -> None:
    sink.behaviour, sink.retry_after = "busy", "100000"
    transport = Transport(sink.url, None, 5.0)
    assert transport.get("/v1/runs/r").retry_after_s == MAX_RETRY_AFTER_S
    transport.close()


def test_the_end_of_a_run_reports_how_much_was_dropped(sink: Sink, tmp_path: Path) -> None:
    config = read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)})
    assert config is not None
    recorder = Recorder(replace(config, row_limit=3), Guard())
    for value in range(10):
        recorder.log({"loss": float(value)})
    recorder.finish("succeeded")
    assert sink.bodies("/v1/runs/r")[-1]["dropped"] == 10 - 3
    assert not sink.invalid


class Stuck:
    """A call that never returns, like one to a store on a dead host or to a disk that hangs."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def __call__(self, *_arguments: object) -> bool:
        self.asked.set()
        self.released.wait(60)
        return False


def test_one_deadline_holds_for_service_store_and_disk_at_the_end(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All three hang, but together they take no longer than one of them may take."""
    sink.behaviour = "hang"
    config = read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "r", "TULA_SPOOL_DIR": str(tmp_path)})
    assert config is not None
    run = Run(replace(config, exit_deadline_s=1.0))
    store, disk = Stuck(), Stuck()
    monkeypatch.setattr(Spool, "append", disk)
    run.oom_watch = OomWatch(store, rank=0, report=lambda *_: None, batch_size=lambda: None, look_every_s=0.001)
    run.oom_watch.start()
    assert store.asked.wait(60)
    began = time.monotonic()
    run.finish()
    took = time.monotonic() - began
    assert disk.asked.is_set()
    store.released.set()
    disk.released.set()
    assert took < 4.0  # each alone would take five seconds or longer


def test_requests_go_to_disk_where_python_starts_no_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 starts no threads while the interpreter exits, which is when most runs are closed."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    last, rows = (SpooledRequest("PATCH", "/v1/runs/r", b"{}"), SpooledRequest("POST", "/v1/runs/r/samples", b"[]", 1))
    exporter = Exporter(lambda: Service(), lambda _last: [rows], tmp_path / "a.spool", guard=Guard())  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(threading.Thread, "start", refuse)
    exporter.close(5.0, lambda: [last])
    assert list(read_records(tmp_path / "a.spool")) == [rows, last]
