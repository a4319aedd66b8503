"""Measures how much longer a ResNet-50 step takes with each gradient-scaling policy than with the plain optimizer.

A step has two micro-steps, since a single rank measures the noise between micro-steps. Several ranks need only one
micro-step each and share the work of turning the updates of matrices, so `cost_of_micro_step`, the added time relative
to one micro-step, is an upper bound for several ranks.
"""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.store import Results, Row, now
from benchmarks.support.resnet import resnet
from tula_agent.scaling import Gain, Policy, TulaOptimizer
from tula_agent.scaling.direction import corrections, matrix_shape

TURNS, MICRO_STEPS = 5, 2
SIZES = {32: 16, 128: 6}
"""Steps in a turn, by the examples of a micro-step; with 32, a GPU waits for the host to launch operations."""


WATCHED = 8


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
"""The first policy is the default during its first 512 steps; the second is the default in later steps."""


def measure(policy: Policy, size: int, device: torch.device, smoke: bool) -> Row:
    """Return the median seconds of a step without and with `policy`, alternating on the same model."""
    torch.manual_seed(0)
    depth, size, side, steps = (18, 2, 32, 1) if smoke else (50, size, 224, SIZES[size])
    model = resnet(depth, channels=3, num_classes=1000, width=8 if smoke else 64).to(device)
    batches = [
        (torch.randn(size, 3, side, side, device=device), torch.randint(1000, (size,), device=device))
        for _ in range(MICRO_STEPS)  # with the same batch twice, there would be no noise and nothing to turn
    ]
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(1 if smoke else TURNS):
        for scaled in (turn % 2 == 0, turn % 2 == 1):
            bare = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
            optimizer: Any = _wrapped(bare, policy, size) if scaled else bare
            for step in range(steps + 2):
                if step == 2:
                    began = now(device)
                optimizer.zero_grad()
                for images, labels in batches:
                    if scaled:
                        optimizer.observe_batch((images, labels))
                    (F.cross_entropy(model(images), labels) / MICRO_STEPS).backward()
                optimizer.step()
            times[scaled].append((now(device) - began) / steps)
            if scaled:
                optimizer.close()
    waits = _waits(model, batches, policy, device)
    added = statistics.median(scaled - bare_s for scaled, bare_s in zip(times[True], times[False], strict=True))
    bare_s = statistics.median(times[False])
    return {
        "step_time_s": bare_s,
        "added_s": added,
        "cost": added / bare_s,
        "cost_of_micro_step": MICRO_STEPS * added / bare_s,
        "waits": waits,
    }


def _wrapped(inner: torch.optim.Optimizer, policy: Policy, size: int) -> TulaOptimizer:
    """Wrap `inner` with a batch of 8 times the base batch, so that ResNet-50's steps are turned despite batch
    normalization.
    """
    return TulaOptimizer(
        inner, global_batch_size=MICRO_STEPS * size, small_batch_size=max(1, MICRO_STEPS * size // 8), policy=policy
    )


def _waits(
    model: torch.nn.Module,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    policy: Policy,
    device: torch.device,
) -> list[str]:
    """Return the operations in eight steps at which the host waits for all work that is queued on the device."""
    bare = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    optimizer = _wrapped(bare, policy, len(batches[0][0]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2 + WATCHED):
            if step == 2 and device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            optimizer.zero_grad()
            for images, labels in batches:
                (F.cross_entropy(model(images), labels) / MICRO_STEPS).backward()
            optimizer.step()
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    optimizer.close()
    return sorted({f"{Path(warning.filename).name}:{warning.lineno} {warning.message}" for warning in caught})


def measure_turning(precision: str, device: torch.device, smoke: bool) -> Row:
    """Return the seconds that it takes to turn the updates of ResNet-50's matrices once, on the host and in total."""
    network = resnet(18 if smoke else 50, channels=3, num_classes=1000, width=8 if smoke else 64)
    shapes = [shape for parameter in network.parameters() if (shape := matrix_shape(parameter)) is not None]
    shapes.sort(key=lambda shape: (shape.rows, shape.columns))
    updates = [torch.randn(shape.rows, shape.columns, device=device) for shape in shapes]
    levels = torch.stack([1e-3 * update.square().sum() for update in updates])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    times: dict[str, list[float]] = {"host_s": [], "seconds": []}
    for _ in range(2 if smoke else 12):
        began = now(device)
        corrections(updates, levels)
        times["host_s"].append(time.perf_counter() - began)
        times["seconds"].append(now(device) - began)
    torch.set_float32_matmul_precision(before)
    operations = sum(shape.operations(host=device.type == "cpu") for shape in shapes)
    return {name: statistics.median(found[2:] or found) for name, found in times.items()} | {"operations": operations}


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add rows for turning the updates of matrices alone, and a row for each policy and micro-step size."""
    ends = time.monotonic() + seconds
    rows = {
        f"{name}, {size} examples": (name, size) for size in list(SIZES)[: 1 if smoke else None] for name in POLICIES
    }
    turning = {f"turning alone, products in {precision}": precision for precision in ("highest", "high")}
    for name in results.missing([*turning, *rows], ends):
        if name in turning:
            results.add(name, measure_turning(turning[name], device, smoke))
        else:
            policy, size = rows[name]
            results.add(name, measure(POLICIES[policy], size, device, smoke))
