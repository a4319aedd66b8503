"""The baselines follow their papers, and one call sets each of them up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tula_agent.scaling import large_batch
from tula_agent.scaling.layerwise import LAMB, LARS


def layer(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(5, 3)


def backward(model: nn.Module, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    F.cross_entropy(model(torch.randn(8, 5, generator=draw)), torch.arange(8) % 3).backward()


@pytest.mark.parametrize(("method", "expected"), [("linear", 16.0), ("sqrt", 4.0)])
def test_the_rate_rises_from_the_base_rate_to_the_rule_and_stays(method, expected):
    model = layer()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    baseline = large_batch(sgd, method, global_batch_size=1024, base_batch_size=64, warmup_steps=10)
    rates = []
    for _ in range(15):
        rates.append(baseline.optimizer.param_groups[0]["lr"])
        backward(model)
        baseline.step()
        baseline.zero_grad()
    assert rates[0] == pytest.approx(0.1)
    assert rates[5] == pytest.approx(0.1 * (1 + (expected - 1) / 2))
    assert rates[10:] == pytest.approx([0.1 * expected] * 5)
    assert baseline.scale == expected
    assert all(p.grad is None for p in model.parameters())


def test_lars_moves_each_matrix_by_its_trust_ratio_and_a_bias_as_sgd_does():
    model = layer()
    optimizer = LARS(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    backward(model)
    gradient = model.weight.grad.clone()
    local = 0.02 * weight.norm() / (gradient.norm() + 0.01 * weight.norm() + 1e-8)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), weight - 0.5 * local * (gradient + 0.01 * weight))
    torch.testing.assert_close(model.bias.detach(), bias - 0.5 * model.bias.grad)


def test_lars_does_not_care_how_large_the_gradient_is():
    moved = []
    for scale in (1.0, 1000.0):
        model = layer()
        optimizer = LARS(model.parameters(), lr=0.5, trust_coefficient=0.02)
        before = model.weight.detach().clone()
        backward(model)
        model.weight.grad.mul_(scale)
        optimizer.step()
        moved.append(model.weight.detach() - before)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-4, atol=1e-7)


def test_lambs_first_step_has_the_length_of_the_weights_times_the_rate():
    model = layer()
    optimizer = LAMB(model.parameters(), lr=0.01, weight_decay=0.1)
    before = model.weight.detach().clone()
    backward(model)
    optimizer.step()
    step = before - model.weight.detach()
    assert step.norm().item() == pytest.approx(0.01 * before.norm().item(), rel=1e-4)


def test_lamb_equals_adamw_on_vectors_where_it_trusts_nothing():
    model, twin = layer(), layer()
    lamb = LAMB([model.bias], lr=0.01, weight_decay=0.0, eps=1e-6)
    adam = torch.optim.AdamW([twin.bias], lr=0.01, weight_decay=0.0, eps=1e-6)
    for seed in range(4):
        for net, optimizer in ((model, lamb), (twin, adam)):
            net.zero_grad()
            backward(net, seed)
            optimizer.step()
    torch.testing.assert_close(model.bias, twin.bias)


@pytest.mark.parametrize("method", ["lars", "lamb"])
def test_layerwise_methods_keep_the_groups_and_the_decay_of_the_optimizer_they_replace(method):
    model = layer()
    groups = [{"params": [model.weight], "weight_decay": 0.3}, {"params": [model.bias], "weight_decay": 0.0, "lr": 0.7}]
    baseline = large_batch(torch.optim.SGD(groups, lr=0.1), method, global_batch_size=256, base_batch_size=64)
    kept = baseline.optimizer.param_groups
    assert [group["weight_decay"] for group in kept] == [0.3, 0.0]
    scale = {"lars": 4.0, "lamb": 2.0}[method]
    assert [group["lr"] for group in kept] == pytest.approx([0.1 * scale, 0.7 * scale])
    backward(model)
    baseline.step()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, on importing its optimizers
def test_post_local_sgd_is_torchs_own_behind_the_same_call():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(layer())
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
        baseline = large_batch(
            sgd, "post_local_sgd", global_batch_size=256, base_batch_size=64, model=ddp, local_steps=2, switch_step=2
        )
        from torch.distributed.optim import PostLocalSGDOptimizer

        assert isinstance(baseline.optimizer, PostLocalSGDOptimizer)
        before = ddp.module.weight.detach().clone()
        for seed in range(6):
            backward(ddp, seed)
            baseline.step()
            baseline.zero_grad()
        assert not torch.equal(before, ddp.module.weight)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "magic"}, "method"),
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"base_batch_size": -1}, "base_batch_size"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"method": "post_local_sgd"}, "model"),
    ],
)
def test_senseless_arguments_are_refused_by_name(change, named):
    arguments = {"method": "linear", "global_batch_size": 256, "base_batch_size": 64, **change}
    with pytest.raises(ValueError, match=named):
        large_batch(torch.optim.SGD(layer().parameters(), lr=0.1), **arguments)


def test_layerwise_optimizers_refuse_sparse_gradients_and_skip_missing_ones():
    table = nn.Embedding(5, 3, sparse=True)
    unused = nn.Parameter(torch.ones(2, 2))
    for kind in (LARS, LAMB):
        optimizer = kind([unused, table.weight], lr=0.1)
        table.weight.grad = None
        optimizer.step()
        assert torch.equal(unused, torch.ones(2, 2))
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
