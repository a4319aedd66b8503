"""Measures what the first guess of a step time is based on: kernel launches, memory layouts and large convolutions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.networks import networks
from benchmarks.gpu.store import Results, Row, now
from benchmarks.gpu.tables import Trainer, free_memory
from tula_agent.measure.launches import launch_time_s

SIZES = (16, 128)
LARGE = 64 * 224 * 224
"""Number of outputs of VGG's first convolution for one example; 668 examples have just below 2^31 outputs."""
EXAMPLES = (512, 640, 668, 670, 704, 768, 1024)


def layout(name: str, size: int, channels_last: bool, device: torch.device, smoke: bool) -> Row:
    """Return the median step time in seconds with `size` examples in channels-last or channels-first format."""
    network, precision = name.split()
    trainer = Trainer(networks(smoke)[network], precision, device)
    return {"step_time_s": trainer.step_time_s(size, channels_last=channels_last, smoke=smoke)}


def convolution(examples: int, device: torch.device, smoke: bool) -> Row:
    """Return the seconds per example of both passes of a 64-channel bf16 convolution over `examples` images."""
    side = 8 if smoke else 224
    layer = nn.Conv2d(64, 64, 3, padding=1).to(device, torch.bfloat16)
    images = torch.randn(2 if smoke else examples, 64, side, side, device=device, dtype=torch.bfloat16)
    images.requires_grad_()
    gradient = torch.ones_like(images)

    def forward_and_backward() -> None:
        layer(images).backward(gradient)
        images.grad = None

    forward_and_backward()
    seconds = _seconds(forward_and_backward, 3, device)
    return {"elements": examples * LARGE, "seconds_per_example": seconds / examples}


def _seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the mean duration of a call to `work` in seconds, over `times` consecutive calls."""
    began = now(device)
    for _ in range(times):
        work()
    return (now(device) - began) / times


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add rows for launching an operation, for each network's memory layouts, and for each number of images."""
    ends = time.monotonic() + seconds
    rows: dict[str, Callable[[], Row]] = {"launch of an operation": lambda: {"seconds": launch_time_s(device)}}
    sizes = (2,) if smoke else SIZES
    precisions = ("fp32",) if smoke else ("bf16", "fp16", "tf32")
    for precision in precisions:
        for size in sizes:
            for last in (False, True):
                label = f"resnet50 {precision}, {size} examples, {'channels last' if last else 'channels first'}"
                rows[label] = partial(layout, f"resnet50 {precision}", size, last, device, smoke)
    for examples in EXAMPLES[: 1 if smoke else None]:
        rows[f"convolution of {examples} images"] = partial(convolution, examples, device, smoke)
    for name in results.missing(rows, ends):
        results.add(name, rows[name]())
        free_memory(device)
