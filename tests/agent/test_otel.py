"""Tests that training metrics reach the process's OpenTelemetry SDK, from which a metric reader collects them."""

from __future__ import annotations

import pytest

from tests.agent.conftest import Launch
from tests.agent.sink import Sink


def test_a_process_with_an_sdk_gets_each_measured_step_as_the_service_does(sink: Sink, launch: Launch) -> None:
    lines = [line.split() for line in launch("with_otel.py").printed("metric")]
    read = {name: (unit, int(count), float(total), run) for _, name, unit, count, total, run in lines}
    rows = [row for body in sink.samples if not body["warmup"] for row in body["step_time_s"]]
    assert read["tula.training.step.duration"] == ("s", len(rows), pytest.approx(sum(rows), rel=1e-3), "run1")
    assert read["tula.training.input.wait.duration"][1] == len(rows)
    assert read["tula.training.communication.exposed.duration"][2] == 0.0, "one rank exchanges nothing"


def test_a_process_without_one_imports_nothing_of_it(launch: Launch) -> None:
    assert launch("with_otel.py", "--without").printed("imported") == ["imported"]
