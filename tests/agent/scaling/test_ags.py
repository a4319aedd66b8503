"""Tests that `ags` implements Algorithm 1 of the paper, and `static` its equation 8."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.agent.scaling.reference import algorithm_1, variability
from tests.agent.scaling.test_optimizer import batches, loss_of, sgd, train, weights
from tula_agent.scaling import Ags, Gain, Static, TulaOptimizer

STEPS_PER_EPOCH = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def plain_sgd(model: nn.Module) -> torch.optim.SGD:
    return sgd(model, momentum=0.0, weight_decay=0.0)


def epochs(count: int = 3):
    data = list(batches(count * STEPS_PER_EPOCH))
    return [data[i : i + STEPS_PER_EPOCH] for i in range(0, len(data), STEPS_PER_EPOCH)]


def by_the_paper(model: nn.Module, delta: float) -> torch.Tensor:
    names = [name for name, _ in model.named_parameters()]

    def gradient(values, batch):
        values = [value.detach().requires_grad_() for value in values]

        def module(inputs):
            return functional_call(model, dict(zip(names, values, strict=True)), (inputs,))

        return list(torch.autograd.grad(loss_of(module, batch), values))

    found = algorithm_1(
        [p.detach().clone() for p in model.parameters()],
        epochs(),
        gradient,
        sample=lambda batch: (batch[0][:8], batch[1][:8]),
        b_small=8,
        b_large=32,
        eta=0.05,
        delta=delta,
    )
    return torch.cat([w.reshape(-1) for w in found])


@pytest.mark.parametrize("delta", [1e9, 0.3])
def test_three_epochs_equal_algorithm_1_line_by_line(delta):
    model = network()
    expected = by_the_paper(copy.deepcopy(model), delta)
    optimizer = TulaOptimizer(
        plain_sgd(model),
        policy=Ags(delta=delta, steps_per_epoch=STEPS_PER_EPOCH, model=model, loss=loss_of),
        small_batch_size=8,
        global_batch_size=32,
    )
    for epoch in epochs():
        train(optimizer, model, epoch, parts=1)
    torch.testing.assert_close(weights(model), expected, rtol=1e-4, atol=1e-6)
    share = optimizer.telemetry()["scaled_share"]
    assert 0.0 < share < 1.0 if delta < 1.0 else share > 0.9


def test_the_first_epoch_is_that_of_the_wrapped_optimizer_and_the_second_is_not():
    model, plain = network(), network()
    optimizer = TulaOptimizer(plain_sgd(model), policy=Ags(delta=1e9, steps_per_epoch=STEPS_PER_EPOCH))
    bare = TulaOptimizer(plain_sgd(plain), policy="none")
    first, second, _ = epochs()
    for tula, net in ((optimizer, model), (bare, plain)):
        train(tula, net, first)
    assert torch.equal(weights(model), weights(plain))
    for tula, net in ((optimizer, model), (bare, plain)):
        train(tula, net, second)
    assert not torch.equal(weights(model), weights(plain))


def test_without_steps_per_epoch_factors_are_found_after_the_first_step_of_the_next_epoch():
    model = network()
    optimizer = TulaOptimizer(plain_sgd(model), policy=Ags(delta=1e9))
    scales = []
    for epoch in epochs(2):
        optimizer.next_epoch()
        for batch in epoch:
            train(optimizer, model, [batch])
            scales.append(optimizer.telemetry()["scale"])
    assert scales[:STEPS_PER_EPOCH] == [1.0] * STEPS_PER_EPOCH
    assert len(set(scales[STEPS_PER_EPOCH:])) == 1
    assert scales[-1] != 1.0


def test_variability_is_that_of_gradients_before_the_clip():
    """Clipping to a small norm would make all norms equal, and then no step would be sensitive."""
    seen = {}
    for limit in (1e9, 1e-3):
        model = network()
        optimizer = TulaOptimizer(plain_sgd(model), policy=Static(1.0, delta=0.3))
        shares = []
        for batch in batches(6):
            train(
                optimizer,
                model,
                [batch],
                after_backward=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), limit),  # noqa: B023
            )
            optimizer.state_dict()  # waits for the numbers of this step
            shares.append(optimizer.telemetry().get("gradient_variability"))  # none of the first step
            with torch.no_grad():  # the same weights for both limits
                model.load_state_dict(network().state_dict())
        seen[limit] = shares[1:]
    assert seen[1e-3] == pytest.approx(seen[1e9], rel=1e-4)
    model, data = network(), list(batches(2))
    gradients = [torch.autograd.grad(loss_of(model, batch), list(model.parameters())) for batch in data]
    assert seen[1e9][0] == pytest.approx(variability(gradients[1], gradients[0]), rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda: Ags(delta=0.0), "delta"),
        (lambda: Ags(delta=math.nan), "delta"),
        (lambda: Ags(s_max=1e-4), "s_max"),
        (lambda: Ags(s_min=math.inf), "s_min"),
        (lambda: Ags(steps_per_epoch=0), "steps_per_epoch"),
        (lambda: Ags(model=nn.Linear(1, 1)), "model and loss"),
        (lambda: Static(1e30), "scale"),
        (lambda: Gain(s_max=0.0), "s_max"),
        (lambda: Gain(spike_limit=1.0), "spike_limit"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_name(wrong, field):
    with pytest.raises(ValueError, match=field):
        wrong()


def test_static_without_a_factor_scales_by_one_until_the_service_gives_one():
    model, plain = network(), network()
    tula, bare = TulaOptimizer(plain_sgd(model), policy=Static(delta=1e9)), plain_sgd(plain)
    for batch in batches(3):
        for optimizer, net in ((tula, model), (bare, plain)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_the_update_of_an_adaptive_optimizer_is_scaled_and_its_state_moves_once_a_step(kind):
    torch.manual_seed(0)
    start = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    inputs = torch.randn(16, 8)
    found = []
    for scale in (1.0, 2.0):
        model = copy.deepcopy(start)
        optimizer = TulaOptimizer(kind(model.parameters(), lr=1e-3), policy=Static(scale, delta=1e9))
        for _ in range(2):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            before = weights(model)
            optimizer.step()
        assert {int(state["step"]) for state in optimizer.state.values()} == {2}
        assert all(p.grad is not None for p in model.parameters())
        found.append(weights(model) - before)
    torch.testing.assert_close(found[1], 2.0 * found[0], rtol=1e-3, atol=1e-7)


def test_a_gradient_of_another_precision_or_a_moved_group_keeps_its_factor():
    model = network()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = TulaOptimizer(torch.optim.SGD(groups, lr=0.05), policy=Ags(delta=1e9, steps_per_epoch=1))
    train(optimizer, model, list(batches(2)))
    optimizer.param_groups.reverse()
    train(optimizer, model, list(batches(2)))
    assert bool(torch.isfinite(weights(model)).all())
