"""Provides the step times of a training run that was recorded on a busy host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_RECORDED = Path(__file__).parents[1] / "data" / "busy_host_steps.csv"


def steady_steps() -> np.ndarray[Any, Any]:
    """Return the times of 2,000 steady steps, divided by their mean, as recorded once at a load of 8 on two cores.

    Two ranks under torchrun trained a small network over gloo, with a pause of 20 ms in place of a slow link.
    """
    times = np.loadtxt(_RECORDED, skiprows=1)
    return np.asarray(times / times.mean())
