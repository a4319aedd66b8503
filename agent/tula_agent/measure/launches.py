"""The time that the host takes to start one operation, which bounds the step time of small batches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tula_agent.torch_private import AllocationTrace

_LAYERS, _WIDTH, _REPEATS = 50, 8, 4


def launch_time_s(device: torch.device) -> float:
    """Return the seconds that an operation of a training step takes where it is too small to keep `device` busy.

    It is the time of a forward and backward pass through fifty tiny layers, the fastest of some repeats, divided by the
    number of operations that `estimate_memory` counts there. The probe takes some 10 ms, draws no random number and
    keeps nothing.
    """
    weight = torch.zeros(_WIDTH, _WIDTH, device=device, requires_grad=True)
    bias = torch.zeros(_WIDTH, device=device, requires_grad=True)

    def step() -> None:
        x = torch.zeros(_WIDTH, _WIDTH, device=device)
        for _ in range(_LAYERS):
            x = F.relu(F.linear(x, weight, bias))
        torch.autograd.grad(x.sum(), (weight, bias))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    trace = AllocationTrace((weight, bias), {})
    with torch.enable_grad():
        with trace:
            step()
        return min(_seconds_of(step) for _ in range(_REPEATS)) / trace.step_operations


def _seconds_of(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
