"""What is checked of a GPU, on the CPU and against a stand-in where CUDA differs: clock, allocator, driver.

`StandIn` keeps its tensors on the CPU; its events, its allocator's figures and its driver's are hand-written, and each
can be wrong in one way. No check ran on a real device here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.gpu import device_checks
from benchmarks.gpu.device_checks import IMPOSSIBLE_BYTES, Device, check
from tula_agent.measure.step_timer import DeviceClock

MIB = 2**20


class Event:
    """As `torch.cuda.Event(enable_timing=True)`, on a device that is never behind the host."""

    def __init__(self, device: StandIn) -> None:
        self.device, self.at = device, 0.0

    def query(self) -> bool:
        return self.device.fault != "an event that is never passed"

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * (1.1e3 if self.device.fault == "a fast clock" else 1e3)


class Block:
    """An allocation."""


class StandIn(Device):
    """An accelerator with one fault, or none."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(torch.device("cpu"))
        self.accelerated, self.fault = True, fault
        self.now = self.peak = 0
        self.ooms = 0

    def synchronize(self) -> None:
        pass

    def clock(self) -> DeviceClock:
        def record(event: Event) -> None:
            event.at = time.perf_counter()

        return DeviceClock(lambda: Event(self), record)

    def work(self) -> None:
        time.sleep(0.01)

    def allocate(self, size: int) -> Any:
        if size >= IMPOSSIBLE_BYTES:
            self.ooms += self.fault != "an allocator that does not count"
            raise ValueError("no") if self.fault == "an unknown error" else torch.cuda.OutOfMemoryError("out of memory")
        block = Block()
        self._grow(size)
        if self.fault != "a leak":
            weakref.finalize(block, self._grow, -size)
        return block

    def _grow(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def allocated(self) -> dict[str, int]:
        rounded = self.now * 2 if self.fault == "a doubled figure" else self.now
        read = {"now": rounded, "peak": max(self.peak, rounded), "reserved": max(self.peak, rounded)}
        self.peak = self.now
        return read

    def used(self) -> int:
        return 300 * MIB + (self.now // 2 if self.fault == "a driver that sees half" else self.now)

    def context_bytes(self) -> int | None:
        return None if self.fault == "no NVML" else 300 * MIB

    def peak_of(self, examples: int) -> int:
        needed = 50 * MIB + examples * MIB
        self.peak = max(self.peak, needed) if self.fault == "a peak that stays" else needed
        return self.peak

    def peaks_of_column(self, sizes: Sequence[int]) -> dict[int, int]:
        if self.fault == "a batch that is not measured":
            return {}
        return {
            size: self.peak_of(max(sizes) if self.fault == "a peak that stays in a column" else size) for size in sizes
        }

    def oom_count(self) -> int:
        return self.ooms


@pytest.mark.parametrize("name", ["events", "allocator", "driver", "peak by batch", "column", "out of memory"])
def test_a_device_without_a_fault_gets_a_pass(name: str) -> None:
    assert [(one.state, one.name) for one in check(StandIn(), name)] == [("pass", name)]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("events", "a fast clock"),
        ("events", "an event that is never passed"),
        ("allocator", "a leak"),
        ("allocator", "a doubled figure"),
        ("driver", "a driver that sees half"),
        ("peak by batch", "a peak that stays"),
        ("column", "a peak that stays in a column"),
        ("column", "a batch that is not measured"),
        ("out of memory", "an allocator that does not count"),
        ("out of memory", "an unknown error"),
    ],
)
def test_each_fault_of_a_device_fails_its_check(name: str, fault: str) -> None:
    assert [one.state for one in check(StandIn(fault), name)] == ["fail"]


def test_a_column_launch_reports_a_peak_for_each_of_its_batches() -> None:
    assert sorted(Device(torch.device("cpu")).peaks_of_column([2, 4, 8])) == [2, 4, 8]


def test_a_figure_that_the_machine_lacks_is_not_measured() -> None:
    (verdict,) = check(StandIn("no NVML"), "driver")
    assert verdict.state == "not measured"
    assert "pip install nvidia-ml-py" in verdict.found


def test_a_check_that_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Device) -> device_checks.Verdict:
        raise RuntimeError(f"CUDA error on {device.name}")

    monkeypatch.setattr(device_checks, "CHECKS", {"broken": broken})
    assert [one.state for one in check(StandIn(), "broken")] == ["fail"]
