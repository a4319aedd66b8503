"""Tests that probes measure the gradient of a small batch with a second backward pass and have no side effects."""

from __future__ import annotations

import torch
from torch import nn

from tests.agent.scaling.test_optimizer import batches, loss_of, network, sgd, train
from tula_agent.scaling import Ags, TulaOptimizer


def test_a_probe_changes_nothing_but_the_factor():
    """Dropout's random numbers, running statistics and gradients equal those of a run without a probe."""
    runs = []
    for probe in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
        torch.manual_seed(7)
        keywords = {"model": model, "loss": loss_of} if probe else {}
        inner = sgd(model, lr=0.0, momentum=0.0, weight_decay=0.0)
        sizes = {"small_batch_size": 8, "global_batch_size": 32}
        optimizer = TulaOptimizer(inner, policy=Ags(steps_per_epoch=4, **keywords), **sizes)
        train(optimizer, model, batches(4), parts=1)
        gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        runs.append((gradients, model[1].running_var.clone(), model[1].num_batches_tracked.clone(), torch.rand(3)))
    assert optimizer.telemetry()["scale"] != 1.0
    for quiet, probed in zip(*runs, strict=True):
        assert torch.equal(quiet, probed)


def test_a_probe_runs_once_an_epoch():
    probed = []

    def counted(module: nn.Module, batch) -> torch.Tensor:
        probed.append(batch)
        return loss_of(module, batch)

    model = network()
    policy = Ags(steps_per_epoch=4, model=model, loss=counted)
    optimizer = TulaOptimizer(sgd(model), policy=policy, small_batch_size=8, global_batch_size=32)
    train(optimizer, model, batches(12), parts=1)
    assert len(probed) == 3
