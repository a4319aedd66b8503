"""Tests TulaOptimizer with what real jobs use: other precisions, unusual parameters, changed groups and policies."""

from __future__ import annotations

import collections
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.agent.scaling.constants import gain
from tula_agent.scaling import Ags, Gain, Static, TulaOptimizer, taps
from tula_agent.scaling.ags import probe_gradients
from tula_agent.scaling.policies import Served
from tula_agent.scaling.ranks import Ranks, owners
from tula_agent.scaling.statistics import GradientStatistics, Reading
from tula_agent.torch_private import norm_squared


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(size: int = 32, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(1)
    while True:
        inputs = torch.randn(size, 6, generator=draw, dtype=dtype)
        yield inputs, inputs[:, :4].argmax(1)


def loss_of(module: nn.Module, batch) -> torch.Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def train(optimizer: TulaOptimizer, model: nn.Module, data, steps: int, parts: int = 4, loss=loss_of) -> None:
    for batch in itertools.islice(data, steps):
        optimizer.zero_grad()
        optimizer.observe_batch(batch)
        for inputs, labels in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
            (loss(model, (inputs, labels)) / parts).backward()
        optimizer.step()


@pytest.mark.parametrize("policy", [Gain(), Ags(delta=1e9, steps_per_epoch=2)])
def test_double_precision_trains(policy):
    model = network().double()
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), policy=policy)
    train(optimizer, model, batches(dtype=torch.float64), 6)
    assert abs(optimizer.telemetry()["scale"] - 1.0) > 1e-3
    assert all(p.dtype == torch.float64 and bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_gradients_are_not_rounded_and_do_not_overflow(dtype):
    gradients = [torch.full((40_000,), 900.0).to(dtype), torch.randn(77).to(dtype), torch.randn(5)]
    exact = sum(float(g.double().square().sum()) for g in gradients)
    assert float(norm_squared(gradients)) == pytest.approx(exact, rel=1e-4)


class Portion(Ranks):
    """One of several ranks, without a process group."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._rank, self._of = rank, size

    @property
    def size(self) -> int:
        return self._of

    @property
    def is_first(self) -> bool:
        return self._rank == 0

    def portion(self, sizes):
        return [owner == self._rank for owner in owners(tuple(sizes), self._of)]


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_ranks_that_share_the_reading_of_gradients_measure_what_one_rank_measures(ranks):
    """The vectors of all ranks are summed; with seven ranks, some ranks read no tensor."""
    model = network()
    model[2].double()
    measuring = GradientStatistics(torch.optim.SGD(model.parameters(), lr=0.1), Ranks())
    measuring.tap.watch(measuring.parameters())
    measuring.tap.arm("tensor")
    for batch in itertools.islice(batches(), 2):
        measuring.observe(batch)
        model[2](model[:2](batch[0]).double()).square().mean().backward()
    found = []
    for size in (1, ranks):
        vectors = []
        for rank in range(size):
            measuring.ranks = Portion(rank, size)
            vectors.append(measuring.measure())
        found.append(Reading(torch.stack(vectors).sum(0)))
    single, shared = found
    exact = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    assert float(single.norm_sq) == pytest.approx(exact, rel=1e-6)
    assert float(shared.norm_sq) == pytest.approx(float(single.norm_sq), rel=1e-12)
    assert shared.moments()[:2] == pytest.approx(single.moments()[:2], rel=1e-12)
    assert (shared.moments()[2], shared.examples) == (single.moments()[2] * ranks, single.examples * ranks)
    assert not shared.disturbed


def test_a_learning_rate_tensor_that_groups_share_is_scaled_once():
    model = network()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    shared = torch.tensor(0.05)
    inner = torch.optim.SGD(groups, lr=shared, foreach=False)
    optimizer = TulaOptimizer(inner)
    seen = []
    inner.register_step_pre_hook(lambda opt, *_: seen.append([float(group["lr"]) for group in opt.param_groups]))
    train(optimizer, model, batches(), 5)
    factor = optimizer.telemetry()["scale"]
    assert factor > 1.05
    assert seen[-1] == pytest.approx([0.05 * factor] * 2)
    assert [group["lr"] for group in optimizer.param_groups] == [shared, shared]
    assert float(shared) == pytest.approx(0.05)


def test_an_empty_parameter_does_not_prevent_scaling():
    model = network()
    model.empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    train(optimizer, model, batches(), 5, loss=lambda net, batch: loss_of(net, batch) + net.empty.sum())
    assert optimizer.telemetry()["scale"] > 1.0


@pytest.mark.parametrize("policy", [Gain(), Ags(delta=1e9, steps_per_epoch=1)])
def test_parameters_added_removed_or_moved_in_the_wrapped_optimizer_are_measured(policy):
    model = network()
    inner = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    optimizer = TulaOptimizer(inner, policy=policy)
    data = batches()
    train(optimizer, model, data, 3)
    inner.add_param_group({"params": list(model[2].parameters())})
    before = model[2].weight.detach().clone()
    train(optimizer, model, data, 3)
    assert not torch.equal(before, model[2].weight)
    known = optimizer.telemetry()["scale"]
    optimizer.param_groups.reverse()
    train(optimizer, model, data, 3)
    optimizer.param_groups.pop()
    train(optimizer, model, data, 3)
    assert optimizer.telemetry()["scale"] not in (1.0, known)


def test_parameters_removed_after_a_backward_pass_leave_no_held_gradient_behind(monkeypatch):
    monkeypatch.setattr(taps, "HELD_ON", ("cpu",))  # as on a GPU
    model = network()
    inner = torch.optim.SGD([{"params": list(model[at].parameters())} for at in (0, 2)], lr=0.05)
    optimizer = TulaOptimizer(inner)
    train(optimizer, model, batches(), 2)
    loss_of(model, next(batches())).backward()
    optimizer.param_groups.pop(0)
    before = model[2].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[2].weight)


@pytest.mark.parametrize("observed", ["whole", "parts", "twice"])
def test_the_batch_size_is_counted_from_observed_batches_for_telemetry_and_checkpoints(observed):
    """The agent observes micro-batches, a script may observe whole batches, and skipped steps do not count."""
    noise = {}
    for given in (True, False):
        model = network()
        size = {"global_batch_size": 32} if given else {}
        optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), small_batch_size=8, **size)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        for step, (inputs, labels) in enumerate(itertools.islice(batches(), 7)):
            if observed == "whole":
                optimizer.observe_batch((inputs, labels))
            optimizer.zero_grad()
            for part in zip(inputs.chunk(4), labels.chunk(4), strict=True):
                for _ in range({"whole": 0, "parts": 1, "twice": 2}[observed]):
                    optimizer.observe_batch(part)
                loss = loss_of(model, part) / 4
                scaler.scale(loss * float("inf") if step == 4 and observed != "whole" else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        saved = optimizer.state_dict()  # waits for the numbers of the last step
        noise[given] = optimizer.telemetry()["gradient_noise_scale"]
        resumed = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), small_batch_size=8)
        resumed.load_state_dict(saved)
        assert resumed.telemetry()["gradient_noise_scale"] == noise[given]
    assert noise[False] == noise[True] > 1.0


class TwoRanks(Ranks):
    """Two ranks with the same gradients."""

    @property
    def size(self) -> int:
        return 2

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2.0)


def test_a_probe_divides_every_gradient_once_even_where_autograd_returns_one_for_two_parameters():
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    model.c = nn.Parameter(torch.ones(3))

    def loss(module, batch):
        return ((module.a + module.b) * batch).sum() + module.c.sum()

    batch = torch.tensor([1.0, 2.0, 3.0])
    found = probe_gradients(model, loss, batch, [model.a, model.b, model.c], ranks=TwoRanks())
    for gradient, expected in zip(found, (batch, batch, torch.ones(3)), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_a_smaller_batch_counts_only_the_second_time_and_sizes_of_a_script_are_averaged():
    optimizer = torch.optim.SGD(network().parameters(), lr=0.0)
    counting = GradientStatistics(optimizer, Ranks())
    for examples, batch_size in ((32, 32), (8, 32), (32, 32), (32, 32), (16, 32), (16, 16)):
        counting.count(examples)
        assert counting.batch_size == batch_size
    tokens = GradientStatistics(optimizer, Ranks())
    for number in range(200):
        size = (500.0, 1500.0)[number % 2]
        tokens.observe(torch.zeros(4, 2), size)
        tokens.count(size)
    assert tokens.batch_size == pytest.approx(1000.0, rel=0.06)


def test_a_probe_cuts_the_batch_out_of_any_mapping():
    model = network()
    optimizer = TulaOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        policy=Ags(
            delta=1e9,
            steps_per_epoch=2,
            model=model,
            loss=lambda module, batch: F.cross_entropy(module(batch["x"]), batch["y"]),
        ),
        global_batch_size=32,
        small_batch_size=8,
    )
    for inputs, labels in itertools.islice(batches(), 5):
        optimizer.zero_grad()
        optimizer.observe_batch(collections.UserDict(x=inputs, y=labels))  # what tokenizers return
        loss_of(model, (inputs, labels)).backward()
        optimizer.step()
    assert optimizer.telemetry()["scale"] != 1.0


def test_served_bounds_hold_from_the_step_at_which_they_take_effect():
    model = network()
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), policy=Ags(delta=1e9))
    data = batches()
    train(optimizer, model, data, 2)
    optimizer.next_epoch()
    train(optimizer, model, data, 1)
    free = optimizer.telemetry()["scale"]
    optimizer.use_served(Served(version=2, s_max=0.9 * free))
    train(optimizer, model, data, 2)  # the first brings the bound, and the second is scaled with it
    assert optimizer.numbers.s_max == 0.9 * free
    scales = []
    for _ in range(3):
        train(optimizer, model, data, 1)
        scales.append(optimizer.telemetry()["scale"])
    assert max(scales) <= 0.9 * free + 1e-6
    assert scales[-1] != 1.0


def test_a_served_number_beyond_the_ratio_of_batches_never_reaches_weights():
    """Through the service, a user can set any value that the API permits."""
    for policy in (Gain(), Static(), Ags(steps_per_epoch=1, delta=1e9)):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = TulaOptimizer(inner, policy=policy, global_batch_size=32, small_batch_size=8)
        optimizer.use_served(Served(version=1, static_scale=1e3, s_min=1e3, s_max=1e3, delta=1e9))
        train(optimizer, model, batches(), 60)
        assert optimizer.telemetry()["thresholds_version"] == 1.0
        assert optimizer.telemetry()["scale"] <= 4.0


def test_what_the_script_passes_stays_whatever_the_service_or_a_checkpoint_says():
    model = network()
    saved = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), small_batch_size=8, global_batch_size=32)
    saved.use_served(Served(version=3, s_max=3.5))
    train(saved, model, batches(), 20)
    resumed = TulaOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), policy=Gain(s_max=1.5), small_batch_size=16, global_batch_size=32
    )
    resumed.load_state_dict(saved.state_dict())
    train(resumed, model, batches(), 20)
    assert (resumed.numbers.s_max, resumed.numbers.small_batch_size) == (1.5, 16)
    assert 1.0 < resumed.telemetry()["scale"] <= 1.5
    unscaled = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), policy="none")
    unscaled.load_state_dict(saved.state_dict())
    train(unscaled, model, batches(), 3)
    assert "scale" not in unscaled.telemetry()


def test_with_a_probe_no_square_is_taken_during_backward(monkeypatch):
    monkeypatch.setattr(taps, "squares", lambda *_: pytest.fail("a backward was tapped"))
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = TulaOptimizer(inner, policy=Ags(steps_per_epoch=2, model=model, loss=loss_of), small_batch_size=8)
    train(optimizer, model, batches(), 3, parts=1)
    assert optimizer.telemetry()["scale"] != 1.0


def test_sharded_parameters_and_a_missing_learning_rate_are_refused():
    marked = nn.Parameter(torch.ones(2))
    marked._fsdp_flattened = True  # the only mark that FSDP with use_orig_params leaves
    with pytest.raises(ValueError, match="sharded"):
        TulaOptimizer(torch.optim.SGD([marked], lr=0.1))
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    inner.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="lr is None"):
        TulaOptimizer(inner)


def test_variability_compares_consecutive_steps_and_unknown_values_are_not_reported():
    reported = {}
    for every in (1, 2):
        model = network()
        optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), policy=gain(measure_every=every))
        train(optimizer, model, batches(), 6)
        reported[every] = optimizer.telemetry()
    norms = []
    for batch in itertools.islice(batches(), 5):
        gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        norms.append(float(norm_squared(gradients)))
    assert reported[1]["gradient_variability"] == pytest.approx(abs(norms[4] - norms[3]) / norms[3], rel=1e-4)
    assert "gradient_variability" not in reported[2]
    assert reported[2]["grad_norm"] == pytest.approx(norms[4] ** 0.5, rel=1e-5)
    unused = TulaOptimizer(torch.optim.SGD(network().parameters(), lr=0.0))
    assert not {"grad_norm", "gradient_variability", "gradient_noise_scale"} & unused.telemetry().keys()


def test_a_closed_wrapper_sets_no_hooks_on_new_parameters(monkeypatch):
    model = network()
    optimizer = TulaOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.01))
    optimizer.close()
    monkeypatch.setattr(taps.GradientTap, "watch", lambda *_: pytest.fail("a closed wrapper set hooks"))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    train(optimizer, model, batches(), 2)


def test_a_closed_wrapper_holds_no_gradient(monkeypatch):
    monkeypatch.setattr(taps, "HELD_ON", ("cpu",))  # as on a GPU
    model, gradients = network(), []
    optimizer = TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    model[0].weight.register_hook(lambda gradient: gradients.append(weakref.ref(gradient)))
    loss_of(model, next(batches())).backward()
    assert gradients[0]() is not None
    optimizer.close()
    assert gradients[0]() is None
