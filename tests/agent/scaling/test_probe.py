"""Probes measure the gradient of a small batch by a second backward, and change nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.agent.scaling.test_optimizer import batches, loss_of, network, sgd, train
from tula_agent.scaling import GainRule, TulaOptimizer


def test_a_probe_changes_nothing_but_the_factor():
    """Dropout's random stream, running statistics and gradients are those of a run without a probe."""
    runs = []
    for source, keywords in (("parts", {}), ("probe", {"small_batch_size": 8, "global_batch_size": 32})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
        torch.manual_seed(7)
        optimizer = TulaOptimizer(sgd(model, lr=0.0), model=model, loss=loss_of, source=source, **keywords)
        train(optimizer, model, batches(5), parts=1)
        gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        runs.append((gradients, model[1].running_var.clone(), model[1].num_batches_tracked.clone(), torch.rand(3)))
        factor = optimizer.telemetry()["scale"]
    assert factor > 1.0
    for quiet, probed in zip(*runs, strict=True):
        assert torch.equal(quiet, probed)


def test_no_probe_runs_where_micro_steps_provide_the_small_batch():
    """A model and a loss are given, but taps measure the noise at less cost."""
    probed = []

    def counted(module: nn.Module, batch) -> torch.Tensor:
        probed.append(batch)
        return loss_of(module, batch)

    model = network()
    optimizer = TulaOptimizer(
        sgd(model), model=model, loss=counted, rule=GainRule(measure_every=4), global_batch_size=32
    )
    train(optimizer, model, batches(6))
    assert optimizer.telemetry()["scale"] > 1.0
    assert not probed


@pytest.mark.parametrize(("every", "steps"), [(None, 9), (4, 3)])
def test_probes_run_at_each_of_the_first_eight_steps_or_at_the_interval_of_the_rule(every, steps):
    probed = []

    def counted(module: nn.Module, batch) -> torch.Tensor:
        probed.append(batch)
        return loss_of(module, batch)

    model = network()
    optimizer = TulaOptimizer(
        sgd(model),
        model=model,
        loss=counted,
        source="probe",
        small_batch_size=8,
        rule=GainRule(measure_every=every),
    )
    train(optimizer, model, batches(12), parts=1)
    assert len(probed) == steps
