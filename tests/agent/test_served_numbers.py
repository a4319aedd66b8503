"""Tests that the service's gradient-scaling values reach all ranks at the same step, unless the script sets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tula_agent.scaling import Ags, Gain, TulaOptimizer
from tula_agent.scaling.pull import ServedNumbers
from tula_agent.ship.transport import Transport


def step(optimizer: TulaOptimizer, model: nn.Module) -> None:
    for _ in range(2):
        model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_every_rank_takes_up_served_numbers_at_the_same_step(sink: Sink, launch: Launch) -> None:
    sink.scaling = {"version": 7, "policy": "gain", "s_max": 1.25, "reason": "unknown fields are ignored"}
    done = launch("scaled.py", ranks=2)
    changes = done.printed("served 7")
    assert len(changes) == 2
    assert len(set(changes)) == 1
    assert changes[0].startswith("served 7 1.25 at ")
    assert not sink.invalid
    assert sink.column("scale")  # what scaling does becomes telemetry


def test_gain_asks_once_and_ags_again_after_each_epoch_with_the_etag(sink: Sink) -> None:
    transport = Transport(sink.url, None, 5.0)
    sink.scaling = {"version": 1, "policy": "ags", "delta": 0.25}
    asked = {}
    for policy in (Gain(), Ags()):
        weight = nn.Parameter(torch.ones(1))
        optimizer = TulaOptimizer(torch.optim.SGD([weight], lr=0.1), policy=policy)
        numbers = ServedNumbers("j", optimizer)
        before = len(sink.gets)
        for _ in range(3):
            for _ in range(2):
                numbers.poll(transport)
            optimizer.next_epoch()
        asked[policy.name] = sink.gets[before:]
        del optimizer
        assert not numbers.wanted
    transport.close()
    assert asked == {"gain": [""], "ags": ["", '"1"', '"1"']}


@pytest.mark.parametrize(("scripted", "served"), [("s_min", {"s_max": 0.5}), ("s_max", {"s_min": 0.9})])
def test_a_served_bound_that_crosses_a_scripted_one_is_left_out(
    sink: Sink, scripted: str, served: dict[str, float]
) -> None:
    model = nn.Linear(3, 1)
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy=Ags(**{scripted: 0.8}))
    alone = optimizer.numbers
    transport = Transport(sink.url, None, 5.0)
    sink.scaling = {"version": 2, "policy": "ags", **served}
    ServedNumbers("j", optimizer).poll(transport)
    transport.close()
    for _ in range(2):
        step(optimizer, model)
    assert optimizer.telemetry()["thresholds_version"] == 2.0
    assert optimizer.numbers == alone


def test_a_run_with_an_agent_on_the_first_rank_only_finishes_with_a_warning(sink: Sink, launch: Launch) -> None:
    """Since only the first rank calls `init`, the run warns that it cannot end early and continues to its end."""
    variables = {"TULA_WARMUP_STEPS": "1", "TULA_MEASURE_STEPS": "8", "TULA_PROBE_S": "0.2"}
    done = launch("first_rank_only.py", ranks=2, **variables)
    assert not any("all_reduces" in body for body in sink.samples)  # the other rank would not have taken part
    assert sorted(done.printed("micro-steps")) == ["micro-steps 0 20", "micro-steps 1 20"]
    assert "the ranks could not agree" in done.stderr
    assert sink.states == ["running", "succeeded"]
