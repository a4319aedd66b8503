"""The power of accelerators while they train, as runs have read it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

import tula_wire as wire
from tula_service.domain import RunSummary
from tula_service.perfmodel.intervals import Interval

_LEAST_SD = 0.1  # of the log of power, from one configuration to another
_OTHER_TYPE_SD = 0.5
_SDS_TO_THE_END = 1.645


def power_of(spec: wire.JobSpec, summaries: Sequence[RunSummary]) -> Mapping[str, Interval]:
    """Watts of a rank's device by instance type, with 90 % intervals; empty where no run has reported energy.

    The geometric mean over runs of joules over seconds of a step. A type without any has that of all others.
    """
    read: dict[str, list[float]] = {}
    for summary in summaries:
        if summary.energy_per_step_j and summary.step_time_s:
            log_w = math.log(summary.energy_per_step_j / summary.step_time_s)
            read.setdefault(summary.configuration.instance_type, []).append(log_w)
    if not read:
        return {}
    everywhere = [log_w for logs in read.values() for log_w in logs]
    found = {}
    for cluster in spec.cluster:
        name = cluster.instance_type
        logs = read.get(name, everywhere)
        sd = math.hypot(_LEAST_SD, float(np.std(logs)), 0.0 if name in read else _OTHER_TYPE_SD)
        mean, width = math.exp(float(np.mean(logs))), math.exp(_SDS_TO_THE_END * sd)
        found[name] = Interval(mean, mean / width, mean * width)
    return found
