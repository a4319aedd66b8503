"""What a drift does to the measurements made before it: the part of the step that slowed down, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire import Configuration

__all__ = ["Slowdown", "attribute", "ratios"]

_MOST = 1e4
_BISECTIONS = 60


@dataclass(frozen=True)
class Slowdown:
    """`factor` on the time of one part of the step: "communication" or "compute"."""

    part: str
    factor: float

    @property
    def sentence(self) -> str:
        """What happened, for a person."""
        word = "slower" if self.factor >= 1 else "faster"
        times = self.factor if self.factor >= 1 else 1 / self.factor
        return f"{self.part} is {times:.2g} times {word} than when it was profiled"


def attribute(
    model: StepTimeModel, configuration: Configuration, step_time_s: float, compute_time_s: float | None
) -> Slowdown:
    """Which part must have changed for this configuration to take `step_time_s`.

    Measured compute decides, where the agent reports it; else a job with several ranks blames the network, which is
    what changes under a running job, and a job with one rank has nothing but compute to blame.
    """
    predicted = model.predict([configuration])
    compute, comm, mean = (float(column[0]) for column in (predicted.compute_s, predicted.comm_s, predicted.mean_s))
    if configuration.world_size == 1 or comm <= 1e-9 * mean:
        return Slowdown("compute", step_time_s / mean)
    if compute_time_s is not None and compute_time_s > 0:
        # Over half of the excess in compute, in log: that is where it is.
        excess = math.log(step_time_s / mean)
        if abs(math.log(compute_time_s / compute)) > 0.5 * abs(excess):
            return Slowdown("compute", step_time_s / mean)
    return Slowdown("communication", _comm_factor(compute, comm, mean, configuration.grad_accum_steps, step_time_s))


def ratios(model: StepTimeModel, slowdown: Slowdown, configurations: Sequence[Configuration]) -> list[float]:
    """By what each configuration's step time changes, one factor for each."""
    if not configurations:
        return []
    if slowdown.part == "compute":
        return [slowdown.factor] * len(configurations)
    predicted = model.predict(list(configurations))
    found = []
    for row, c in enumerate(configurations):
        compute, comm, mean = (
            float(column[row]) for column in (predicted.compute_s, predicted.comm_s, predicted.mean_s)
        )
        if c.world_size == 1 or comm <= 1e-9 * mean:
            found.append(1.0)
            continue
        last, overlap = _overlap(compute, comm, mean, c.grad_accum_steps)
        found.append(_with_comm(compute, comm * slowdown.factor, last, overlap) / mean)
    return found


def _overlap(compute: float, comm: float, mean: float, micro_steps: int) -> tuple[float, float]:
    """Compute of the last micro-step, and the exponent g for which (T_g^g + T_s^g)^(1/g) gives the predicted step."""
    last = compute / micro_steps
    target = max(mean - (compute - last), max(last, comm) * (1 + 1e-12))
    low, high = 1.0, 64.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _norm(last, comm, middle) > target else (low, middle)
    return last, 0.5 * (low + high)


def _with_comm(compute: float, comm: float, last: float, overlap: float) -> float:
    return compute - last + _norm(last, comm, overlap)


def _comm_factor(compute: float, comm: float, mean: float, micro_steps: int, step_time_s: float) -> float:
    last, overlap = _overlap(compute, comm, mean, micro_steps)
    low, high = math.log(1 / _MOST), math.log(_MOST)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        slower = _with_comm(compute, comm * math.exp(middle), last, overlap) < step_time_s
        low, high = (middle, high) if slower else (low, middle)
    return math.exp(0.5 * (low + high))


def _norm(first: float, second: float, power: float) -> float:
    largest = max(first, second)
    return float(largest * np.power(np.power(first / largest, power) + np.power(second / largest, power), 1 / power))
