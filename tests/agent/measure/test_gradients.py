"""Tests that the gradient norm is correct and that its cost is bounded."""

from __future__ import annotations

import time

import pytest
import torch

from tula_agent.measure.gradients import MAX_COST_S, GradientReader
from tula_agent.torch_private import norm_squared


def optimizer_of(*gradients: torch.Tensor) -> torch.optim.Optimizer:
    """Return an optimizer whose parameters have these gradients."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_all_gradients_as_one_vector(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n, dtype=dtype) for n in (1, 17, 300)]
    expected = torch.cat([part.double() for part in parts]).square().sum()
    assert float(norm_squared(parts)) == pytest.approx(float(expected), rel=1e-5)


def test_half_precision_does_not_overflow() -> None:
    assert float(norm_squared([torch.full((100,), 3000.0, dtype=torch.float16)])) == pytest.approx(9e8, rel=1e-2)


def test_no_gradients_have_no_norm() -> None:
    assert float(norm_squared([])) == 0


def test_norms_come_in_pairs_and_stay_within_the_budget() -> None:
    reader, optimizer = GradientReader(), optimizer_of(torch.randn(4_000_000))
    steps, spent = [], 0.0
    for step in range(3000):
        if step >= reader.due:
            began = time.thread_time()
            reader.read(step, 0.1, [], optimizer)
            spent += time.thread_time() - began if step > 20 else 0.0
            steps.append(step)
    assert all(second - first == 1 for first, second in zip(steps[::2], steps[1::2], strict=False))
    assert 4 <= len(steps) < 1500
    assert spent / 2980 <= 4 * MAX_COST_S  # a cost is known only once it has been paid


def test_variability_is_equation_5_of_two_steps_in_a_row() -> None:
    reader = GradientReader()
    assert reader.read(4, 0.1, [], optimizer_of(torch.tensor([3.0, 4.0]))) == [("grad_norm", 5.0)]
    second = reader.read(5, 0.1, [], optimizer_of(torch.tensor([6.0, 8.0])))
    assert second == [("grad_norm", 10.0), ("gradient_variability", 3.0)]


def test_a_fused_optimizer_that_unscales_by_itself_has_its_true_norm() -> None:
    """When such an optimizer steps, gradients are still scaled, and its `grad_scale` is the GradScaler's scale."""
    read: dict[str, float] = {}
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    reader = GradientReader()
    optimizer.register_step_pre_hook(lambda own, _args, _named: read.update(reader.read(0, 0.1, [], own)))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert read["grad_norm"] == pytest.approx(2.0)


def test_a_step_that_the_optimizer_skips_ends_no_sampling() -> None:
    reader, read, optimizer = GradientReader(), [], optimizer_of(torch.ones(10))
    for step in range(2000):
        if step % 2 and step >= reader.due:  # a GradScaler that finds an inf at every even step
            assert len(reader.read(step, 0.1, [], optimizer)) == 1  # never two in a row
            read.append(step)
    assert len(read) > 10
