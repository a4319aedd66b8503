"""What gradient scaling costs a step of ResNet-50, by policy, against the bare optimizer in turns.

A step has two micro-steps, since one rank measures the noise between them alone. Several ranks measure it from one
micro-step each and share the directions of the matrices, so `cost_of_micro_step`, what is added over the time of one
micro-step, is more than they pay.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.store import Results, Row, now
from benchmarks.support.resnet import resnet
from tula_agent.scaling import Gain, Policy, TulaOptimizer

TURNS, MICRO_STEPS = 5, 2
SIZES = {32: 16, 128: 6}
"""Steps in a turn, by examples of a micro-step: a GPU waits for the host's launches of the smaller one."""


class EveryStep(Gain):
    measure_every = 1


class EveryEighth(Gain):
    measure_every = 8


class MeasureAlone(EveryStep):
    damping = None


POLICIES: dict[str, Policy] = {
    "gain and direction, every step measured": EveryStep(),
    "gain and direction, every eighth step measured": EveryEighth(),
    "gain without direction, every step measured": MeasureAlone(),
}
"""The first policy is the default in its first 512 steps, the second is the default in the long run."""


def measure(policy: Policy, size: int, device: torch.device, smoke: bool) -> Row:
    """Return the seconds of a step with the bare optimizer and with `policy`, medians of turns on the same model."""
    torch.manual_seed(0)
    depth, size, side, steps = (18, 2, 32, 1) if smoke else (50, size, 224, SIZES[size])
    model = resnet(depth, channels=3, num_classes=1000).to(device)
    images, labels = torch.randn(size, 3, side, side, device=device), torch.randint(1000, (size,), device=device)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(1 if smoke else TURNS):
        for scaled in (turn % 2 == 0, turn % 2 == 1):
            bare = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
            optimizer: Any = (
                TulaOptimizer(bare, global_batch_size=MICRO_STEPS * size, policy=policy) if scaled else bare
            )
            for step in range(steps + 2):
                if step == 2:
                    began = now(device)
                optimizer.zero_grad()
                for _ in range(MICRO_STEPS):
                    if scaled:
                        optimizer.observe_batch((images, labels))
                    (F.cross_entropy(model(images), labels) / MICRO_STEPS).backward()
                optimizer.step()
            times[scaled].append((now(device) - began) / steps)
            if scaled:
                optimizer.close()
    added = statistics.median(scaled - bare_s for scaled, bare_s in zip(times[True], times[False], strict=True))
    bare_s = statistics.median(times[False])
    return {
        "step_time_s": bare_s,
        "added_s": added,
        "cost": added / bare_s,
        "cost_of_micro_step": MICRO_STEPS * added / bare_s,
    }


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add a row for each policy and micro-step."""
    ends = time.monotonic() + seconds
    rows = {
        f"{name}, {size} examples": (name, size) for size in list(SIZES)[: 1 if smoke else None] for name in POLICIES
    }
    for name in results.missing(rows, ends):
        policy, size = rows[name]
        results.add(name, measure(POLICIES[policy], size, device, smoke))
