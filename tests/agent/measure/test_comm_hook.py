"""The communication hook, asked for: training is what it was without, and the noise scale is the true one."""

from __future__ import annotations

from statistics import median

import pytest

from tests.agent.conftest import Launch
from tests.agent.sink import Sink

PARAMETERS, MEAN, VARIANCE = 200, 0.5, 1.0


def test_weights_are_those_of_a_run_without_it_bit_for_bit_and_the_noise_scale_is_right(
    sink: Sink, launch: Launch
) -> None:
    done = launch("noisy.py", ranks=3)  # of three, a mean rounds
    weights = {tuple(line.split()[1:4]): line.split()[4] for line in done.printed("weights")}
    assert len(weights) == 15
    assert len({digest for (what, *_), digest in weights.items() if what != "taken"}) == 1
    assert done.stderr.count(": no gradient noise scale") == 3  # the hook that is there stays, on each rank
    assert "left out" not in done.stderr
    truth = PARAMETERS * VARIANCE / (PARAMETERS * MEAN**2)
    measured = [
        value
        for body in sink.telemetry
        for value in body["columns"].get("gradient_noise_scale", [])
        if value is not None
    ]
    assert len(measured) >= 3  # how often the norm is taken depends on how busy the machine is
    assert median(measured) == pytest.approx(truth, rel=0.3)
    assert not sink.invalid
