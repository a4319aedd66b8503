"""Thresholds reach the optimizers of all ranks at one step, and an unchanged answer costs a header."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tula_agent.scaling import ScalingThresholds, TulaOptimizer
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.thresholds import AGREE_EVERY, SyncedThresholds, ThresholdPoller
from tula_agent.ship.transport import Transport


def test_every_rank_switches_to_served_thresholds_at_the_same_step(sink: Sink, launch: Launch) -> None:
    sink.scaling = {"version": 7, "policy": "gain", "delta": 0.25, "reason": "unknown fields are ignored"}
    done = launch("scaled.py", ranks=2)
    changes = done.printed("thresholds 7")
    assert len(changes) == 2
    assert len(set(changes)) == 1
    assert changes[0].startswith("thresholds 7 0.25 at ")
    assert not sink.invalid
    assert sink.column("scale")  # what scaling does becomes telemetry


def test_polling_sends_the_etag_and_never_changes_what_the_script_passed(sink: Sink) -> None:
    class Optimizer:
        scripted_thresholds = ScalingThresholds(policy="static", static_scale=2.0, small_batch_size=64)
        scripted_names = frozenset({"policy", "static_scale", "small_batch_size"})

        def __init__(self) -> None:
            self.got: list[ScalingThresholds] = []

        def apply_thresholds(self, thresholds: ScalingThresholds) -> None:
            self.got.append(thresholds)

    optimizer = Optimizer()
    transport = Transport(sink.url, None, 5.0)
    poller = ThresholdPoller("/v1/jobs/j/scaling", optimizer, every_s=0.0)
    sink.scaling = {"version": 1, "small_batch_size": None, "delta": None}
    poller.poll(transport)
    poller.poll(transport)
    sink.scaling = {"version": 2, "delta": 0.1}
    poller.poll(transport)
    sink.scaling = {"version": 5, "static_scale": 9.0, "small_batch_size": 8, "delta": 0.1, "granularity": "tensor"}
    poller.poll(transport)
    sink.scaling = {"version": 6, "policy": "ags", "delta": 0.9}
    poller.poll(transport)
    transport.close()
    assert sink.gets == ["", '"1"', '"1"', '"2"', '"5"']
    # Values that the service leaves null stay the script's; those that the script passed stay in any case.
    scripted = Optimizer.scripted_thresholds
    tuned = replace(scripted, version=2, delta=0.1)
    assert optimizer.got == [
        replace(scripted, version=1),
        tuned,
        replace(tuned, version=5, granularity="tensor"),
        replace(scripted, version=6),
    ]


@pytest.mark.parametrize(("scripted", "served"), [("s_min", {"s_max": 0.5}), ("s_max", {"s_min": 0.9})])
def test_a_served_bound_that_crosses_a_scripted_one_is_left_out_alone_with_one_warning(
    sink: Sink, caplog: pytest.LogCaptureFixture, scripted: str, served: dict[str, float]
) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = TulaOptimizer(torch.optim.SGD([weight], lr=0.1), **{scripted: 0.8})
    poller = ThresholdPoller("/v1/jobs/j/scaling", optimizer, every_s=0.0)
    transport = Transport(sink.url, None, 5.0)
    for version in (1, 2):
        sink.scaling = {"version": version, "policy": "ags", **served}
        poller.poll(transport)
        for _ in range(AGREE_EVERY + 1):
            optimizer.step()
        found = optimizer.thresholds
        assert (found.version, found.policy) == (version, "ags")
        assert replace(found, version=0, policy="gain") == optimizer.scripted_thresholds
    transport.close()
    assert caplog.text.count("the service's bound is ignored: with the script's, s_min = ") == 1
    assert f"{scripted} = 0.8" in caplog.text


def test_a_run_with_an_agent_on_the_first_rank_only_finishes_with_a_warning(sink: Sink, launch: Launch) -> None:
    """`init` on the first rank only: the run cannot end early, says so, and goes through."""
    variables = {"TULA_WARMUP_STEPS": "1", "TULA_MEASURE_STEPS": "8", "TULA_PROBE_S": "0.2"}
    done = launch("first_rank_only.py", ranks=2, **variables)
    assert not any("all_reduces" in body for body in sink.samples)  # the other rank would not have taken part
    assert sorted(done.printed("micro-steps")) == ["micro-steps 0 20", "micro-steps 1 20"]
    assert "the ranks could not agree" in done.stderr
    assert sink.states == ["running", "succeeded"]


def test_a_vector_that_makes_no_sense_changes_nothing_on_any_rank() -> None:
    """F1: what reaches the ranks is checked again before it is applied; an error would end the training in `step`."""
    synced = SyncedThresholds(Ranks())
    vector = [1.0, *ScalingThresholds(version=3, delta=0.25).to_vector()]
    for slot in range(1, len(vector)):
        for wrong in (math.nan, math.inf, -math.inf, -2.0, 1e300):
            synced.load([*vector[:slot], wrong, *vector[slot + 1 :]])
            found = synced.poll(1, ScalingThresholds(), torch.device("cpu"))
            # Any other number than that of `element` stands for `tensor`.
            assert found is None or (slot == 3 and found.granularity == "tensor"), (slot, wrong, found)
    synced.load(vector)
    assert synced.poll(1, ScalingThresholds(), torch.device("cpu")) == ScalingThresholds(version=3, delta=0.25)
