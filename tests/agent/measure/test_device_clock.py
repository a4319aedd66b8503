"""Tests that the device clock reuses events, never waits, and falls back to wall time if events fail.

The tests need no CUDA device: `Event` and `Driver` below are small hand-written stand-ins for a device that advances
only when the test advances it. `make test-gpu` tests the clock and a CUDA graph capture on a real device.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agent.sink import Sink
from tula_agent.config import read_config
from tula_agent.guard import Guard
from tula_agent.launch import Launch
from tula_agent.measure.step_timer import DeviceClock, clock_for
from tula_agent.readings import Readings, StepTiming, beside_captures
from tula_agent.run import Run
from tula_agent.ship.request_builder import Identity, RequestBuilder


class Device:
    """A stream that reaches events in the order in which they were recorded, each after the work queued before it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.queue: deque[tuple[float, Event]] = deque()
        self.queued_ms = 0.0
        self.broken = False

    def work(self, ms: float) -> None:
        """Queue work that takes this long on the device; the host does not wait."""
        self.queued_ms += ms

    def record(self, event: Event) -> None:
        event.passed_ms = None
        self.queue.append((self.queued_ms, event))

    def run_until(self, ms: float) -> None:
        while self.queue and self.queue[0][0] <= ms:
            at, event = self.queue.popleft()
            event.passed_ms = at


class Event:
    """A stand-in for `torch.cuda.Event(enable_timing=True)`; reading its time too early is an error."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed_ms: float | None = None

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.passed_ms is not None

    def elapsed_time(self, end: Event) -> float:
        if self.passed_ms is None or end.passed_ms is None:
            raise RuntimeError("device not ready")
        return end.passed_ms - self.passed_ms


def clock_of(device: Device, pool_size: int = 256) -> DeviceClock:
    return DeviceClock(lambda: Event(device), device.record, pool_size)


def mark(clock: DeviceClock, device: Device, wait: float, compute: float, update: float):
    clock.begin()
    device.work(wait)
    clock.batch()
    device.work(compute)
    clock.optimizer()
    device.work(update)
    return clock.end()


milliseconds = st.floats(0.01, 1000)


@given(st.lists(st.tuples(milliseconds, milliseconds, milliseconds), min_size=1, max_size=20))
def test_every_step_gets_its_own_times_however_late_it_is_asked(steps: list[tuple[float, float, float]]) -> None:
    device = Device()
    clock = clock_of(device)
    intervals = [mark(clock, device, *step) for step in steps]
    assert all(interval is not None and interval.poll() is None for interval in intervals)
    device.run_until(device.queued_ms)
    for (wait, compute, update), interval in zip(steps, intervals, strict=True):
        assert interval is not None
        assert interval.poll() == pytest.approx(((wait + compute + update) / 1e3, wait / 1e3, update / 1e3), abs=1e-8)


def test_events_are_reused() -> None:
    device = Device()
    clock = clock_of(device)
    for _ in range(1000):
        interval = mark(clock, device, 1, 2, 3)
        device.run_until(device.queued_ms)
        assert interval is not None
        assert interval.poll() == pytest.approx((6e-3, 1e-3, 3e-3))
    assert clock.events_made == 4


def test_a_slow_device_uses_no_more_events_than_the_pool_and_is_timed_again_when_it_catches_up() -> None:
    device = Device()
    clock = clock_of(device, pool_size=10)
    under_way = [mark(clock, device, 1, 1, 1) for _ in range(50)]
    timed = [interval for interval in under_way if interval is not None]
    assert 1 <= len(timed) <= 3
    assert clock.events_made == 10
    device.run_until(device.queued_ms)
    assert all(interval.poll() is not None for interval in timed)
    after = mark(clock, device, 1, 1, 1)
    device.run_until(device.queued_ms)
    assert after is not None
    assert after.poll() == pytest.approx((3e-3, 1e-3, 1e-3))


def test_an_abandoned_step_returns_its_events() -> None:
    device = Device()
    clock = clock_of(device, pool_size=4)
    for _ in range(20):
        clock.begin()
        clock.batch()
        clock.drop()
    assert clock.events_made == 2
    assert clock.end() is None
    assert mark(clock, device, 1, 1, 1) is not None


def test_a_device_without_events_has_no_clock() -> None:
    assert clock_for(torch.device("cpu")) is None
    assert clock_for(torch.device("meta")) is None


@dataclass
class Rank:
    """The readings of one rank, and the requests that the shipping thread makes from them."""

    readings: Readings
    requests: RequestBuilder

    def samples(self, last: bool = False) -> list[dict[str, object]]:
        due = self.requests.collect(last)
        return [json.loads(request.body) for request in due if request.path.endswith("/samples")]


@pytest.fixture
def rank() -> Rank:
    readings = Readings(1000)
    requests = RequestBuilder(
        readings,
        Launch("r", None),
        guard=Guard(),
        identity=lambda: Identity(0, "boot", 1),
        channel=lambda: None,
        is_training=lambda: True,
    )
    return Rank(readings, requests)


def test_a_sample_waits_for_the_device_and_names_its_clock(rank: Rank) -> None:
    device = Device()
    clock = clock_of(device)
    for step in range(3):
        interval = mark(clock, device, 5, 90, 5)
        assert interval is not None
        rank.readings.device.append((step, interval))
        rank.readings.add_step(StepTiming(step, 0.5, 0.4, 1, 8, False), warmup=False)  # the host saw something else
    assert rank.samples() == []
    device.run_until(250)
    [body] = rank.samples()
    assert body["timing_method"] == "cuda_events"
    assert body["step"] == [0, 1]
    assert body["compute_time_s"] == [0.095, 0.095]
    assert body["step_time_s"] == [0.1, 0.1]
    assert body["input_time_s"] == [0.005, 0.005]
    [body] = rank.samples(last=True)  # the process ends before the device came by
    assert (body["timing_method"], body["step"], body["step_time_s"]) == ("wall", [2], [0.5])


def test_samples_have_wall_time_after_a_device_failed_and_one_warning(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    clock = clock_of(device)
    for step in range(3):
        interval = mark(clock, device, 5, 90, 5)
        assert interval is not None
        rank.readings.device.append((step, interval))
        rank.readings.add_step(StepTiming(step, 0.5, 0.4, 1, 8, False), warmup=False)
    device.broken = True
    [body] = rank.samples()
    assert (body["timing_method"], body["step"], body["step_time_s"]) == ("wall", [0, 1, 2], [0.5] * 3)
    assert len(caplog.records) == 1


def test_the_clock_stops_after_an_event_fails_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(event: Event) -> None:
        raise RuntimeError(f"CUDA error: out of memory, {event}")

    device = Device()
    clock = DeviceClock(lambda: Event(device), refuse)
    assert [mark(clock, device, 1, 1, 1) for _ in range(5)] == [None] * 5
    assert clock.events_made == 1
    assert len(caplog.records) == 1


def test_nothing_is_recorded_into_a_graph_that_is_being_captured() -> None:
    device = Device()
    clock = DeviceClock(lambda: Event(device), device.record, capturing=lambda: True)
    interval = mark(clock, device, 1, 2, 3)
    device.run_until(6)
    assert interval is not None
    timing = interval.poll()
    assert timing is not None
    assert timing[0] == pytest.approx(6e-3)
    assert timing[2] is None


@pytest.mark.parametrize("capturing", [False, True])
def test_gradients_are_not_read_into_a_graph_that_is_being_captured(
    capturing: bool, monkeypatch: pytest.MonkeyPatch, sink: Sink, tmp_path: Path
) -> None:
    device = Device()

    def record(event: Event) -> None:
        event.passed_ms = 0.0

    clock = DeviceClock(lambda: Event(device), record, capturing=lambda: capturing)
    monkeypatch.setattr("tula_agent.recorder.clock_for", lambda _: clock)
    config = read_config({"TULA_URL": sink.url, "TULA_RUN_ID": "run1", "TULA_SPOOL_DIR": str(tmp_path)})
    run, model = Run(config), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.watch(model, optimizer)
    for batch in run.steps([torch.ones(2, 4)] * 4):
        model(batch).sum().backward()
        optimizer.step()
    run.finish()
    assert sink.steps() == [0, 1, 2, 3]
    assert bool(sink.column("grad_norm")) is not capturing


def test_moments_without_an_event_have_no_time() -> None:
    device = Device()
    clock = clock_of(device)
    clock.begin()
    device.work(7)
    interval = clock.end()
    device.run_until(7)
    assert interval is not None
    assert interval.poll() == (7e-3, None, None)


class Driver:
    """A stand-in for libcuda that keeps the capture mode of the one thread that calls it."""

    def __init__(self) -> None:
        self.mode = 0

    def cuThreadExchangeStreamCaptureMode(self, pointer: Any) -> int:
        pointer._obj.value, self.mode = self.mode, pointer._obj.value
        return 0


def test_a_thread_that_asks_events_leaves_the_captures_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr("ctypes.CDLL", lambda _: driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    inside = None
    with contextlib.suppress(ZeroDivisionError), beside_captures():
        inside = driver.mode
        _ = 1 / 0
    assert inside == 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert driver.mode == 0


@pytest.mark.parametrize("initialized", [True, False])
def test_events_are_asked_without_a_driver_too(initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    asked = False
    with beside_captures():
        asked = True
    assert asked
