"""Tests what the agent reads from NVML, with a stand-in for its library that has the same functions and units."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch

from tula_agent.guard import Guard
from tula_agent.launch import Launch
from tula_agent.measure.energy import EnergyMeter
from tula_agent.measure.memory import context_bytes, device_use, total_energy_j
from tula_agent.readings import Readings, StepTiming
from tula_agent.ship.request_builder import Identity, RequestBuilder


def library(failing: bool = False) -> SimpleNamespace:
    def handle(uuid: str) -> str:
        if failing:
            raise RuntimeError("NVML_ERROR_LIBRARY_NOT_FOUND")
        return uuid

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetUtilizationRates=lambda _handle: SimpleNamespace(gpu=87, memory=31),
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(total=16 * 2**30, free=6 * 2**30, used=10 * 2**30),
        nvmlDeviceGetTotalEnergyConsumption=lambda _handle: 5_000,  # millijoules
        nvmlDeviceGetComputeRunningProcesses=lambda _handle: [SimpleNamespace(pid=-1, usedGpuMemory=3 * 2**30)],
    )


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="1f2e"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2 * 2**30)


@pytest.mark.usefixtures("properties")
def test_a_device_says_how_busy_it_is_and_what_all_processes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    device = torch.device("cuda", 98)  # the handle of each device is kept
    assert device_use(device) == {"gpu_utilization": 0.87, "gpu_memory_bytes": 10 * 2**30}
    assert total_energy_j(device) == 5.0
    assert context_bytes(device) == 2**30, "a single process on the device is taken for this one"


@pytest.mark.usefixtures("properties")
def test_nothing_is_said_without_a_gpu_or_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(failing=True))
    device = torch.device("cuda", 99)
    assert device_use(device) == {}
    assert total_energy_j(device) is None
    assert context_bytes(device) is None
    assert device_use(torch.device("cpu")) == {}
    assert device_use(None) == {}


def test_each_delivery_reports_the_devices_use_at_its_newest_step() -> None:
    uses: list[Mapping[str, float]] = [{"gpu_utilization": 0.5}, {"gpu_utilization": 0.9}]
    readings = Readings(100)
    builder = RequestBuilder(
        readings, Launch("r", 8), guard=Guard(), identity=lambda: Identity(0, "b", 1),
        channel=lambda: None, is_training=lambda: True, device_use=lambda: uses.pop(0),
    )  # fmt: skip
    found = []
    for steps in ((0, 1, 2), (), (3,)):
        for step in steps:
            readings.add_step(StepTiming(step, 0.1, 0.0, 1, 8, False), warmup=False)
        bodies = [json.loads(each.body) for each in builder.collect() if each.path.endswith("/telemetry")]
        found += [(body["steps"], body["columns"]["gpu_utilization"]) for body in bodies]
    assert found == [([0, 1, 2], [None, None, 0.5]), ([3], [0.9])]


def test_the_energy_of_a_step_is_the_mean_power_times_the_mean_time_of_a_step() -> None:
    clock, joules = iter([0.0, 0.5, 2.0, 4.0]), iter([100.0, 400.0, 700.0])
    meter = EnergyMeter(lambda _: next(joules), lambda: next(clock))
    device = torch.device("cpu")
    assert meter.joules_per_step(8, device) is None, "it has not begun"
    meter.begin(8, device)
    meter.add_step(0.2)
    assert meter.joules_per_step(8, device) is None, "within a second the counter may not have moved"
    meter.add_step(0.2)
    assert meter.joules_per_step(8, device) == pytest.approx(150.0 * 0.2)
    meter.add_step(0.5)  # most of the four seconds belongs to no step, as an evaluation does not
    assert meter.joules_per_step(8, device) == pytest.approx(150.0 * 0.3)


def test_the_energy_of_one_batch_is_never_reported_as_that_of_the_next() -> None:
    clock, joules = iter([0.0, 2.0, 3.0, 5.0]), iter([100.0, 400.0, 600.0])
    meter = EnergyMeter(lambda _: next(joules), lambda: next(clock))
    meter.begin(8, None)
    meter.add_step(0.2)
    assert meter.joules_per_step(16, None) is None, "the steps so far were of another batch"
    meter.begin(16, None)
    meter.add_step(0.4)
    assert meter.joules_per_step(16, None) == pytest.approx(100.0 * 0.4)


def test_no_energy_is_reported_where_nothing_counts_it() -> None:
    meter = EnergyMeter(lambda _: None, lambda: 0.0)
    meter.begin(8, None)
    meter.add_step(0.1)
    assert meter.joules_per_step(8, None) is None
