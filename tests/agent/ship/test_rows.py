"""Tests that request bodies fit the contract and that no row is lost or changed, whatever training appends."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.guard import Guard
from tula_agent.launch import Launch
from tula_agent.readings import CommTiming, Readings, StepTiming
from tula_agent.ship.request_builder import (
    MAX_NAMES,
    Identity,
    MetricNames,
    RequestBuilder,
    SampleRow,
    StepSplit,
    sample_bodies,
    telemetry_bodies,
)
from tula_agent.ship.spool import encode
from tula_wire import MAX_BODY_BYTES, SampleBatch, TelemetryChunk

IDENTITY = Identity(0, "b", 2)
seconds = st.floats(0, 1e4)
timings = st.builds(
    StepTiming,
    step=st.integers(0, 10**6),
    step_time_s=st.floats(1e-9, 1e4),
    input_time_s=seconds,
    micro_steps=st.integers(1, 8),
    local_batch_size=st.one_of(st.none(), st.integers(1, 4096)),
    uneven=st.booleans(),
    optimizer_time_s=st.none() | seconds,
)
rows = st.builds(
    SampleRow,
    timing=timings,
    warmup=st.booleans(),
    method=st.sampled_from(["wall", "ddp_logger"]),
    split=st.one_of(
        st.none(),
        st.builds(StepSplit, seconds, seconds, seconds, st.one_of(st.none(), seconds), st.none() | st.integers(0, 7)),
    ),
)


@given(st.lists(rows, max_size=40), st.integers(0, 10**9))
def test_every_row_is_sent_once_under_its_own_number(items: list[SampleRow], first: int) -> None:
    bodies = sample_bodies(items, IDENTITY, first)
    batches = [SampleBatch.model_validate_json(encode(body)) for body in bodies]
    sent = {number: step for batch in batches for number, step in zip(batch.sequence, batch.step, strict=True)}
    assert sent == {first + index: row.timing.step for index, row in enumerate(items)}


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["loss", "lr"]), st.floats(allow_nan=True)), max_size=60))
def test_telemetry_keeps_the_last_finite_value_of_each_step(values: list[tuple[int, str, float]]) -> None:
    bodies = telemetry_bodies(values, IDENTITY, 0)
    if not values:
        assert bodies == []
        return
    (chunk,) = (TelemetryChunk.model_validate_json(encode(body)) for body in bodies)
    assert chunk.steps == sorted({step for step, _, _ in values})
    last = {(step, name): value for step, name, value in values}
    for name, column in chunk.columns.items():
        for step, sent in zip(chunk.steps, column, strict=True):
            value = last.get((step, name))
            if value is None or value != value or abs(value) == float("inf"):
                assert sent is None
            else:
                assert sent is not None
                assert abs(sent - value) <= 1e-5 * abs(value)


def test_telemetry_of_any_size_is_sent_in_bodies_that_the_service_takes() -> None:
    wide = [(step, f"c{column}", -1.23456e-05) for step in range(1000) for column in range(130)]
    tall = [(step, "loss", -1.23456e-05) for step in range(1000, 22_000)]
    bodies = telemetry_bodies(wide + tall, IDENTITY, 7)
    assert max(len(encode(body)) for body in bodies) <= MAX_BODY_BYTES
    chunks = [TelemetryChunk.model_validate_json(encode(body)) for body in bodies]
    assert [chunk.sequence for chunk in chunks] == list(range(7, 7 + len(chunks)))
    sent = [
        (step, name)
        for chunk in chunks
        for name, column in chunk.columns.items()
        for step, value in zip(chunk.steps, column, strict=True)
        if value is not None
    ]
    assert sorted(sent) == sorted((step, name) for step, name, _ in wide + tall)


@given(st.lists(st.text(max_size=80), unique=True, max_size=20))
def test_whatever_a_metric_is_called_it_has_a_name_of_its_own_on_the_wire(names: list[str]) -> None:
    metrics = MetricNames()
    sent = [metrics.wire_name(name) for name in names]
    assert len(set(sent)) == len(names)
    assert all(name is not None and re.fullmatch("[a-z][a-z0-9_]{0,63}", name) for name in sent)
    assert [metrics.wire_name(name) for name in names] == sent


def test_a_metric_that_is_renamed_or_one_too_many_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricNames()
    assert [metrics.wire_name(name) for name in ("loss", "Loss", "val/acc", "Loss")] == [
        "loss",
        "loss_2",
        "val_acc",
        "loss_2",
    ]
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == [
        "The metric 'Loss' is sent as 'loss_2'",
        "The metric 'val/acc' is sent as 'val_acc'",
    ]
    for number in range(MAX_NAMES):
        metrics.wire_name(f"m{number}")
    assert metrics.wire_name("one_more") is None


def test_ddps_times_of_a_smaller_last_batch_make_no_sample() -> None:
    readings = Readings(100)
    builder = RequestBuilder(
        readings, Launch("r", 8), guard=Guard(), identity=lambda: Identity(0, "b", 1),
        channel=lambda: None, is_training=lambda: True,
    )  # fmt: skip
    for step, size in enumerate((8, 5)):
        readings.add_step(StepTiming(step, 0.1, 0.0, 1, size, size != 8), warmup=False, sampled=False)
    for step in (0, 1):  # DDP publishes the times of a step when the next ones have ended
        readings.comm.append(CommTiming(step, 0.1, 0.0, 0.05, 0.01))
    sent = [json.loads(each.body) for each in builder.collect(last=True) if each.path.endswith("/samples")]
    assert [(body["local_batch_size"], body["step"]) for body in sent] == [(8, [0])]


@pytest.mark.parametrize(
    ("waited_s", "small"), [(0.4, (0.5 - 0.3, 0.4 / 4)), (0.9, (0.5 / 4, 0.5 / 4))], ids=["waited", "fetched before"]
)
def test_the_time_in_which_the_loader_prepared_other_examples_counts_in_no_step_of_a_batch_that_was_cut(
    waited_s: float, small: tuple[float, float]
) -> None:
    readings = Readings(100)
    builder = RequestBuilder(
        readings, Launch("r", 8, [(2, "small")]), guard=Guard(), identity=lambda: Identity(0, "b", 1),
        channel=lambda: None, is_training=lambda: False,
    )  # fmt: skip
    for step, size in enumerate((2, 8)):
        readings.add_step(StepTiming(step, 0.5, waited_s, 1, size, False), warmup=False, sampled=True)
    sent = {each.path.split("/")[3]: json.loads(each.body) for each in builder.collect(last=True)}
    times = {run: (body["step_time_s"][0], body["input_time_s"][0]) for run, body in sent.items()}
    assert times == {"small": pytest.approx(small), "r": (0.5, min(waited_s, 0.5))}
