"""Tests TulaOptimizer in one process: factors equal the formulas, and training resumes from checkpoints bit for bit."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agent.scaling.constants import gain
from tests.agent.scaling.reference import gain_of_parts
from tula_agent.scaling import Ags, Gain, Static, TulaOptimizer
from tula_agent.scaling.policies import Served
from tula_agent.scaling.taps import GradientTap


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def batches(steps: int, size: int = 32, seed: int = 1):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(size, 6, generator=draw)
        yield inputs, (inputs[:, :4].argmax(1))


def sgd(model: nn.Module, **options) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, **options})


def loss_of(module: nn.Module, batch) -> torch.Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def accumulate(model, batch, parts: int, factor: float = 1.0) -> list[torch.Tensor]:
    """Run the backward pass of `parts` micro-steps; return the flat gradient of each micro-step, for comparison."""
    seen = []
    for inputs, labels in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
        loss = loss_of(model, (inputs, labels))
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        seen.append(torch.cat([g.reshape(-1) for g in gradients]))
        (loss * factor / parts).backward()
    return seen


def train(optimizer, model, data, parts: int = 4, after_backward=lambda: None) -> None:
    for batch in data:
        optimizer.zero_grad()
        optimizer.observe_batch(batch)
        for inputs, labels in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
            (loss_of(model, (inputs, labels)) / parts).backward()
        after_backward()
        optimizer.step()


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_policy_none_equals_the_wrapped_optimizer_bit_for_bit():
    plain, wrapped = network(), network()
    bare, tula = sgd(plain), TulaOptimizer(sgd(wrapped), policy="none")
    for batch in batches(5):
        for model, optimizer in ((plain, bare), (wrapped, tula)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    assert torch.equal(weights(plain), weights(wrapped))


def test_the_gain_of_a_step_is_adascales_and_scales_the_learning_rate_of_the_next():
    model = network()
    inner = sgd(model)
    optimizer = TulaOptimizer(inner, policy=gain(noise_weight=1.0, growth=None))
    rates = []
    inner.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
    first, second = batches(2)
    # On a copy of the model, whose leaves have no hooks.
    parts = accumulate(copy.deepcopy(model), first, 4)
    train(optimizer, model, [first, second])
    assert rates[0] == 0.05
    assert rates[1] == pytest.approx(0.05 * gain_of_parts(parts, batch_ratio=4.0), rel=1e-5)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("factor", "clip"), [(65536.0, None), (1.0, 0.01), (65536.0, 0.01), (4.0, None)], ids=["amp", "clip", "both", "sum"]
)
def test_loss_scale_clipping_and_summed_accumulation_do_not_change_the_gain(factor, clip):
    """One least-squares factor removes all three, so the gain equals that of a run without them."""
    gains = []
    for scale, limit in ((1.0, None), (factor, clip)):
        model = network()
        optimizer = TulaOptimizer(sgd(model, lr=0.0, weight_decay=0.0), policy=gain(noise_weight=1.0, growth=None))
        for batch in batches(6):
            optimizer.zero_grad()
            for inputs, labels in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
                (loss_of(model, (inputs, labels)) * scale / 4).backward()
            if limit is not None:
                for parameter in model.parameters():
                    parameter.grad.div_(scale)  # what GradScaler.unscale_ does
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        gains.append(optimizer.telemetry()["scale"])
    assert gains[0] > 1.05
    assert gains[1] == pytest.approx(gains[0], rel=1e-3)


def test_the_growth_limit_bounds_how_fast_the_gain_rises():
    model = network()
    optimizer = TulaOptimizer(sgd(model), policy=gain(growth=1.25))
    seen = [1.0]
    for batch in batches(30):
        train(optimizer, model, [batch])
        seen.append(optimizer.telemetry()["scale"])
    assert all(after <= before * 1.25 + 1e-12 for before, after in itertools.pairwise(seen))
    assert max(seen) > 1.25


def test_optimizers_that_divide_by_the_gradients_size_take_the_root_of_the_gain():
    """With a learning rate of zero, both optimizers see the same gradients."""
    seen = []
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = network()
        optimizer = TulaOptimizer(kind(model.parameters(), lr=0.0), policy=gain(growth=None))
        train(optimizer, model, batches(6))
        seen.append(optimizer.telemetry()["scale"])
    assert seen[0] > 1.05
    assert seen[1] == pytest.approx(seen[0] ** 0.5, rel=1e-9)


def test_progress_is_the_sum_of_the_factors_and_continues_after_a_checkpoint():
    model = network()
    optimizer = TulaOptimizer(sgd(model), policy=gain(growth=None))
    factors = []
    for batch in batches(10):
        train(optimizer, model, [batch])
        factors.append(optimizer.telemetry()["scale"])
    assert optimizer.progress == pytest.approx(sum(factors))
    assert optimizer.progress > 10.5
    resumed = TulaOptimizer(sgd(model))
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.progress == optimizer.progress
    unscaled = TulaOptimizer(sgd(model), policy="none")
    train(unscaled, model, batches(3))
    assert unscaled.progress == 3.0


def test_a_sensitive_step_is_not_scaled():
    model, plain = network(), network()
    tula, bare = TulaOptimizer(sgd(model), policy=Static(3.0, delta=1e-12)), sgd(plain)
    for batch in batches(4):
        for optimizer, net in ((tula, model), (bare, plain)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    assert torch.equal(weights(model), weights(plain))
    assert tula.telemetry()["scaled_share"] == 0.0


def test_the_update_of_adam_is_scaled_since_it_divides_a_scaled_gradient_away():
    start, moved = network(), {}
    for scale in (1.0, 2.0):
        model = copy.deepcopy(start)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        optimizer = TulaOptimizer(inner, policy=Static(scale, delta=1e9))
        first, second = batches(2)
        train(optimizer, model, [first], parts=1)
        before = weights(model)
        train(optimizer, model, [second], parts=1)
        moved[scale] = weights(model) - before
    torch.testing.assert_close(moved[2.0], 2.0 * moved[1.0], rtol=1e-3, atol=1e-7)


POLICIES = {"gain": Gain(), "ags": Ags(steps_per_epoch=7), "static": Static()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_checkpoint_continues_bit_for_bit(policy, kind, tmp_path):
    def build():
        model = network()
        inner = sgd(model) if kind == "sgd" else torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, TulaOptimizer(inner, policy=POLICIES[policy])

    data = list(batches(24))
    model, optimizer = build()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for batch in data[:11]:
        train(optimizer, model, [batch])
        schedule.step()
    optimizer.use_served(Served(version=5, static_scale=1.2, s_max=1.9))
    for batch in data[11:17]:
        train(optimizer, model, [batch])
        schedule.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    resumed_model, resumed = build()
    resumed_schedule = torch.optim.lr_scheduler.StepLR(resumed, 5, 0.5)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed_model.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    resumed_schedule.load_state_dict(loaded["schedule"])
    for net, opt, plan in ((model, optimizer, schedule), (resumed_model, resumed, resumed_schedule)):
        for batch in data[17:]:
            train(opt, net, [batch])
            plan.step()
    assert torch.equal(weights(model), weights(resumed_model))
    assert resumed.telemetry()["thresholds_version"] == 5.0
    assert resumed.numbers == optimizer.numbers
    assert resumed.telemetry() == pytest.approx(optimizer.telemetry(), rel=0, abs=0, nan_ok=True)


def test_a_checkpoint_from_before_wrapping_is_accepted():
    model = network()
    bare = sgd(model)
    loss_of(model, next(batches(1))).backward()
    bare.step()
    optimizer = TulaOptimizer(sgd(model))
    optimizer.load_state_dict(bare.state_dict())
    assert optimizer.state[next(model.parameters())]["momentum_buffer"] is not None
    train(optimizer, model, batches(2))


def test_a_job_resumed_with_another_batch_keeps_its_noise_scale():
    model = network()
    optimizer = TulaOptimizer(sgd(model), global_batch_size=32)
    train(optimizer, model, batches(10))
    resumed = TulaOptimizer(sgd(model), global_batch_size=64)
    resumed.load_state_dict(optimizer.state_dict())
    expected = optimizer.telemetry()["gradient_noise_scale"]
    assert resumed.telemetry()["gradient_noise_scale"] == pytest.approx(expected)


def test_parameters_unfrozen_after_wrapping_are_measured():
    model = network().requires_grad_(False)
    optimizer = TulaOptimizer(sgd(model))
    model.requires_grad_(True)
    train(optimizer, model, batches(5))
    assert optimizer.telemetry()["scale"] > 1.0


def test_missing_zero_sparse_and_frozen_gradients_and_added_groups_train():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.used, self.unused, self.frozen = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 4)
            self.dead = nn.Parameter(torch.ones(3))
            self.late = nn.Linear(4, 3)
            self.frozen.requires_grad_(False)

        def forward(self, tokens):
            hidden = self.frozen(self.table(tokens))
            return self.used(hidden) + 0.0 * self.dead + self.late(hidden)

    for policy in (Gain(), Ags(steps_per_epoch=2), Static(2.0)):
        torch.manual_seed(0)
        model = Odd()
        late = list(model.late.parameters())
        early = [p for p in model.parameters() if all(p is not other for other in late)]
        optimizer = TulaOptimizer(torch.optim.SGD(early, lr=0.1), policy=policy)
        before = copy.deepcopy(model.state_dict())
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": late, "lr": 0.01})
            optimizer.zero_grad(set_to_none=True)
            for part in range(4):
                tokens = torch.arange(8) % 10 + part * 0
                F.cross_entropy(model(tokens), (tokens + step) % 3).backward()
            optimizer.step()
        after = model.state_dict()
        assert all(bool(torch.isfinite(value).all()) for value in after.values())
        for name in ("unused.weight", "frozen.weight", "dead"):
            assert torch.equal(after[name], before[name])
        for name in ("used.weight", "late.weight", "table.weight"):
            assert not torch.equal(after[name], before[name])


def test_a_step_that_grad_scaler_skips_does_not_enter_the_gain():
    model = network()
    optimizer = TulaOptimizer(sgd(model), policy=gain(growth=None))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step, batch in enumerate(batches(12)):
        optimizer.zero_grad()
        for inputs, labels in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            loss = loss_of(model, (inputs, labels)) / 4
            scaler.scale(loss * float("inf") if step == 5 else loss).backward()
        before = weights(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, weights(model)) == (step == 5)
    assert scaler.get_scale() == 2.0**9
    assert math.isfinite(optimizer.telemetry()["gradient_noise_scale"])
    assert 1.0 < optimizer.telemetry()["scale"] <= 4.0
    assert bool(torch.isfinite(weights(model)).all())


def test_the_learning_rate_is_restored_when_the_wrapped_step_raises():
    model = network()
    inner = sgd(model)
    optimizer = TulaOptimizer(inner)
    train(optimizer, model, batches(3))

    def fail(*_):
        raise RuntimeError("no")

    inner.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        train(optimizer, model, batches(1))
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_tensor_learning_rate_is_scaled_and_restored_in_place():
    model = network()
    rate = torch.tensor(0.05)
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=rate, foreach=False))
    train(optimizer, model, batches(5))
    assert optimizer.telemetry()["scale"] > 1.0
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


def test_without_any_small_batch_the_factor_stays_one():
    model = network()
    optimizer = TulaOptimizer(sgd(model))
    train(optimizer, model, batches(4), parts=1)
    assert optimizer.telemetry()["scale"] == 1.0


def test_an_object_that_cannot_be_wrapped_is_refused_with_a_reason():
    model = network()
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        TulaOptimizer(model)
    with pytest.raises(TypeError, match="LBFGS"):
        TulaOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="small_batch_size is 0"):
        TulaOptimizer(sgd(model), small_batch_size=0)
    with pytest.raises(ValueError, match="policy is 'magic': use one of gain"):
        TulaOptimizer(sgd(model), policy="magic")


def test_a_closed_tap_has_removed_its_hooks():
    model = network()
    tap = GradientTap()
    tap.watch(list(model.parameters()))
    tap.close()
    tap.arm("tensor")
    loss_of(model, next(batches(1))).backward()
    assert tap.parts == 0


def test_a_closed_optimizer_takes_the_steps_of_the_wrapped_one():
    closed, plain = network(), network()
    optimizer = TulaOptimizer(sgd(closed))
    optimizer.close()
    train(optimizer, closed, batches(4))
    bare = TulaOptimizer(sgd(plain), policy="none")
    train(bare, plain, batches(4))
    assert torch.equal(weights(closed), weights(plain))
