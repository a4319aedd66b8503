"""Tests when the buckets of a real DDP module are ready, and that the timer removes its hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tula_agent.measure import ddp
from tula_agent.measure.ddp import TIMED_STEPS, BucketTimer


class Slow(torch.autograd.Function):
    """A layer whose backward pass takes 5 ms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        time.sleep(0.005)
        return gradient


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Slow.apply(layer(x))
        return x


@pytest.fixture
def gloo() -> Iterator[None]:
    """Create a process group that contains only this process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_buckets_are_timed_in_the_order_of_their_reduction(gloo: None) -> None:  # noqa: ARG001
    model = nn.parallel.DistributedDataParallel(Network(), bucket_cap_mb=1)
    found = timed(model)
    assert found is not None
    assert found["bucket_bytes"] == [4 * 512 * 513] * 4
    times = [0.0, *found["ready_s"]]
    assert all(after - before >= 0.005 for before, after in pairwise(times))
    assert timed(model) is not None  # nothing of the first timer is left to disturb the second


def test_a_model_that_skips_parameters_has_no_timeline(gloo: None) -> None:  # noqa: ARG001
    network = Network()
    network.unused = nn.Linear(3, 3)
    model = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)
    assert timed(model, ddp.MOST_STEPS) == {}


def test_the_first_rank_sends_the_timeline_once(sink: Sink, launch: Launch) -> None:
    launch("train.py", ranks=2, TULA_WARMUP_STEPS="2", TULA_MEASURE_STEPS="20")
    (body,) = [body for body in sink.samples if "timeline" in body]
    assert body["rank"] == 0
    assert len(body["timeline"]["bucket_bytes"]) == len(body["timeline"]["ready_s"]) >= 1
    assert 0.0 < body["timeline"]["ready_s"][-1] < 10.0


def timed(model: nn.Module, steps: int = TIMED_STEPS) -> dict[str, list[float]] | None:
    """Return the timer's result after `steps` steps, and assert that it had none before.

    Before these steps, one backward pass lets DDP order its buckets.
    """
    model(torch.randn(2, 512)).sum().backward()
    timer = BucketTimer(model)
    found = None
    for _ in range(steps):
        assert found is None
        timer.begin()
        model(torch.randn(2, 512)).sum().backward()
        found = timer.end()
    return found
