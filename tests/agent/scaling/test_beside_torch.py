"""Tests gradient scaling with other PyTorch interfaces: each is supported, or a message says what to do instead."""

from __future__ import annotations

import copy
import gc
import logging
import math
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.agent.scaling.constants import gain
from tula_agent.recorder import TrackedObjects
from tula_agent.scaling import Ags, Gain, Measure, Static, TulaOptimizer
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.statistics import GradientStatistics

POLICIES = [Gain(), Measure(), Ags(steps_per_epoch=4, delta=1e9), Static(1.5), "none"]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)


def sgd(model: nn.Module, lr: float = 0.05, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def micro_batches(seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator(device="cpu").manual_seed(seed)
    while True:
        yield (
            torch.randn(8, 16, generator=draw, device="cpu"),
            torch.randint(0, 4, (8,), generator=draw, device="cpu"),
        )


def backward(model: nn.Module, data: Iterator[Any], parts: int = 4, scale: float = 1.0) -> None:
    kind = next(model.parameters()).dtype
    for _ in range(parts):
        inputs, labels = next(data)
        (F.cross_entropy(model(inputs.to(kind)).float(), labels) * scale / parts).backward()


def train(model: nn.Module, optimizer: Any, steps: int, data: Iterator[Any], parts: int = 4) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model, data, parts)
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sentences(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("tula_agent")]


# Hooks go with their optimizer.


def hooks_on(parameter: torch.Tensor) -> int:
    """Return how many backward and post-accumulate hooks a parameter has; torch has no public way to list them."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def test_twenty_wrappers_on_one_model_leave_the_hooks_of_the_last_one_alone():
    model, counts = network(), []
    for _ in range(20):
        optimizer = TulaOptimizer(sgd(model))
        train(model, optimizer, 2, micro_batches())
        counts.append(hooks_on(model[0].weight))
    assert counts == [counts[0]] * 20
    del optimizer
    assert hooks_on(model[0].weight) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_is_freed_with_the_optimizer_without_a_collection(policy):
    model = network()
    optimizer = TulaOptimizer(sgd(model), policy=policy)
    train(model, optimizer, 6, micro_batches())
    alive = weakref.ref(model[0].weight)
    gc.disable()
    try:
        del model, optimizer
        assert alive() is None
    finally:
        gc.enable()


def test_an_optimizer_whose_construction_fails_leaves_no_hook():
    model = network()
    with pytest.raises(ValueError, match="global_batch_size"):
        TulaOptimizer(sgd(model), global_batch_size=0)
    assert hooks_on(model[0].weight) == 0


def test_a_second_optimizer_on_the_same_model_measures_what_it_would_alone():
    scales = []
    for others in (0, 1):
        model = network()
        kept = [TulaOptimizer(sgd(model)) for _ in range(others)]
        optimizer = TulaOptimizer(sgd(model))
        train(model, optimizer, 10, micro_batches())
        scales.append(optimizer.telemetry()["scale"])
        del kept
    assert scales[0] == scales[1] > 1.0


def test_copies_of_a_model_are_not_counted_and_can_be_saved(tmp_path):
    scales = []
    for with_copies in (False, True):
        model = network()
        optimizer = TulaOptimizer(sgd(model))
        data = micro_batches()
        for _ in range(10):
            optimizer.zero_grad()
            backward(model, data)
            if with_copies:
                copy.deepcopy(model)(torch.ones(2, 16)).sum().backward()
                AveragedModel(model).update_parameters(model)
                torch.save(model, tmp_path / "model.pt")
            optimizer.step()
        scales.append(optimizer.telemetry()["scale"])
    assert scales[0] == scales[1]


# What a backward pass is, and what a step is.


@pytest.mark.parametrize("policy", [Measure(), Gain()])
def test_autograd_grad_over_parameters_is_no_micro_step(policy):
    seen = []
    for penalty in (False, True):
        model = network()
        optimizer = TulaOptimizer(sgd(model, lr=0.0), policy=policy, global_batch_size=32)
        data = micro_batches()
        for _ in range(12):
            optimizer.zero_grad()
            for _ in range(4):
                inputs, labels = next(data)
                loss = F.cross_entropy(model(inputs), labels)
                if penalty:
                    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
                (loss / 4).backward()
            if penalty:
                torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(model.parameters()))
            optimizer.step()
        seen.append(optimizer.telemetry())
    assert seen[0] == seen[1]
    assert seen[0]["gradient_noise_scale"] > 0.0


def drop_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARS: dict[str, Callable[[nn.Module, TulaOptimizer], None]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer to zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "wrapped optimizer": lambda _, optimizer: optimizer.optimizer.zero_grad(),
    "model": lambda model, _: model.zero_grad(),
    "model to zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "by hand": lambda model, _: drop_by_hand(model),
}


@pytest.mark.parametrize("clear", CLEARS)
def test_a_step_that_grad_scaler_skips_leaves_no_trace_however_gradients_are_cleared(clear):
    model = network()
    optimizer = TulaOptimizer(sgd(model, lr=0.0), policy=gain(growth=None), small_batch_size=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=10**6)
    data, counted = micro_batches(), []
    for step in range(30):
        for _ in range(4):
            inputs, labels = next(data)
            optimizer.observe_batch((inputs, labels))
            loss = F.cross_entropy(model(inputs), labels) / 4
            scaler.scale(loss * math.inf if step == 15 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        CLEARS[clear](model, optimizer)
        telemetry = optimizer.telemetry()
        assert telemetry["step"] == step + (step < 15)
        counted.append(telemetry["scale"])
    assert max(counted) <= 4.0  # B / b, of which the skipped step would make 8
    assert counted[-1] > 1.5


def test_gradients_of_another_models_step_that_are_dropped_are_no_parts():
    """A generator's backward pass runs through the critic; the script drops its gradients with `critic.zero_grad()`."""
    scales = []
    for passes_through in (False, True):
        torch.manual_seed(0)
        critic, maker = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), nn.Linear(16, 16)
        optimizer = TulaOptimizer(sgd(critic))
        data = micro_batches()
        for _ in range(20):
            critic.zero_grad()
            backward(critic, data)
            optimizer.step()
            if passes_through:
                critic(maker(torch.ones(8, 16))).square().mean().backward()
        scales.append(optimizer.telemetry()["scale"])
    assert scales[0] == scales[1] > 1.0


@pytest.mark.parametrize("parts", [32, 64])
def test_bfloat16_gradients_of_many_micro_steps_are_measured_as_those_of_float32(parts, caplog):
    scales = []
    for kind in (torch.float32, torch.bfloat16):
        model = network(kind)
        optimizer = TulaOptimizer(sgd(model, lr=0.0), policy="measure", global_batch_size=8 * parts)
        with caplog.at_level(logging.WARNING):
            train(model, optimizer, 12, micro_batches(), parts)
        scales.append(optimizer.telemetry()["gradient_noise_scale"])
    assert not sentences(caplog)
    assert scales[1] == pytest.approx(scales[0], rel=0.3)


def test_the_batch_of_varying_sizes_is_their_average():
    draw, statistics = random.Random(0), GradientStatistics(sgd(network()), Ranks())
    sizes, counted = [], []
    for _ in range(200):
        sizes.append(draw.randint(1000, 3000))
        statistics.observe(torch.ones(8, 1), size=sizes[-1])
        statistics.count(statistics.examples)
        statistics.forget_batch()
        counted.append(statistics.batch_size)
    assert sum(counted) / 200 == pytest.approx(sum(sizes) / 200, rel=0.03)


@pytest.mark.parametrize("parts", [2, 8])
def test_a_job_resumed_with_another_counted_batch_uses_it_from_its_first_measurement(parts):
    def run(model, optimizer, steps, parts):
        data = micro_batches()
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(parts):
                batch = next(data)
                optimizer.observe_batch(batch)
                backward(model, iter([batch]), 1, scale=1.0 / parts)
            optimizer.step()
            yield optimizer.telemetry()["scale"]

    model = network()
    first = TulaOptimizer(sgd(model), small_batch_size=8)
    before = list(run(model, first, 60, 4))[-1]
    assert before > 2.5
    resumed = TulaOptimizer(sgd(model), small_batch_size=8)
    resumed.load_state_dict(first.state_dict())
    factors = list(run(model, resumed, 6, parts))
    assert all(factor <= parts for factor in factors[1:])


# Torch's own savers, wrappers and settings.


@contextmanager
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


KINDS = {
    "gain": (Gain(), 0.9),
    "gain, no momentum": (Gain(), 0.0),
    "ags": (Ags(steps_per_epoch=4, delta=1e9), 0.9),
    "ags, no momentum": (Ags(steps_per_epoch=4, delta=1e9), 0.0),
    "static": (Static(1.5), 0.9),
    "none": ("none", 0.9),
}


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_distributed_checkpoint_keeps_the_state_and_takes_no_step(kind, on_disk, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    policy, momentum = KINDS[kind]

    def make() -> tuple[nn.Module, TulaOptimizer]:
        model = network()
        return model, TulaOptimizer(sgd(model, momentum=momentum), policy=policy, small_batch_size=8)

    def run(model: nn.Module, optimizer: TulaOptimizer, steps: int, data: Iterator[Any]) -> None:
        for _ in range(steps):
            for _ in range(4):
                batch = next(data)
                optimizer.observe_batch(batch)
                backward(model, iter([batch]), 1)
            optimizer.step()
            optimizer.zero_grad()

    with one_rank(tmp_path):
        model, optimizer = make()
        run(model, optimizer, 10, micro_batches())
        steps = optimizer.telemetry()["step"]
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        assert optimizer.telemetry()["step"] == steps == 10.0
        again, resumed = make()
        again.load_state_dict(model.state_dict())
        loaded = get_optimizer_state_dict(again, resumed)
        assert resumed.telemetry()["step"] == 0.0
        if on_disk:
            dcp.save(saved, checkpoint_id=tmp_path / "saved")
            dcp.load(loaded, checkpoint_id=tmp_path / "saved")
        else:
            loaded = saved
        set_optimizer_state_dict(again, resumed, optim_state_dict=loaded)
    assert resumed.progress == optimizer.progress
    for net, opt in ((model, optimizer), (again, resumed)):
        run(net, opt, 6, micro_batches(seed=2))
    assert torch.equal(weights(model), weights(again))
    assert resumed.telemetry() == optimizer.telemetry()


@pytest.mark.parametrize("policy", [Gain(s_max=1.5), Measure(), Static(1.5), "none"])
def test_a_job_resumed_from_distributed_checkpoint_may_have_another_policy(policy, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    with one_rank(tmp_path):
        model = network()
        optimizer = TulaOptimizer(sgd(model), global_batch_size=32, small_batch_size=8)
        train(model, optimizer, 20, micro_batches())
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path / "saved")
        resumed = TulaOptimizer(sgd(model), policy=policy, global_batch_size=32, small_batch_size=8)
        loaded = get_optimizer_state_dict(model, resumed)
        dcp.load(loaded, checkpoint_id=tmp_path / "saved")
        set_optimizer_state_dict(model, resumed, optim_state_dict=loaded)
    assert optimizer.telemetry()["scale"] > 1.5
    assert resumed.progress == optimizer.progress
    train(model, resumed, 4, micro_batches(seed=2))
    assert resumed.telemetry().get("scale", 1.0) <= 1.5


def test_hooks_on_a_state_run_when_it_is_saved_and_loaded():
    model, calls = network(), []
    optimizer = TulaOptimizer(sgd(model))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", "saved", "before loading", "loaded"]


@pytest.mark.parametrize("policy", [Gain(), Measure()])
def test_steps_at_a_learning_rate_of_zero_are_measured_also_where_few_steps_are(policy):
    model = network()
    optimizer = TulaOptimizer(sgd(model, lr=0.0), policy=policy, global_batch_size=32)
    train(model, optimizer, 140, micro_batches(), 2)
    assert optimizer.telemetry()["step"] == 140.0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_scripts_default_device_changes_nothing(policy):
    ends = []
    for device in ("cpu", "meta"):
        with torch.device("cpu"):
            model = network()
        with torch.device(device):
            optimizer = TulaOptimizer(sgd(model), policy=policy, small_batch_size=8)
            data = micro_batches()
            for step in range(20):
                for _ in range(4):
                    batch = next(data)
                    optimizer.observe_batch(batch)
                    backward(model, iter([batch]), 1)
                optimizer.step()
                optimizer.zero_grad()
                if step == 10:
                    optimizer.load_state_dict(optimizer.state_dict())
                    optimizer = copy.deepcopy(optimizer) if policy == "none" else optimizer
        ends.append((weights(model), optimizer.telemetry()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


class Spectral(nn.Module):
    """A layer with complex weights, like those in Fourier neural operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4, dtype=torch.cfloat))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.cfloat) @ self.weight).abs() + self.bias


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("policy", POLICIES)
def test_complex_weights_train(policy, kind):
    torch.manual_seed(0)
    model = Spectral()
    optimizer = TulaOptimizer(kind(model.parameters(), lr=1e-3), policy=policy, small_batch_size=8)
    data = micro_batches()
    for _ in range(12):
        optimizer.zero_grad()
        for _ in range(4):
            batch = next(data)
            optimizer.observe_batch(batch)
            backward(model, iter([batch]), 1)
        optimizer.step()
    assert bool(torch.isfinite(torch.view_as_real(model.weight.detach())).all())
    if policy in (POLICIES[0], POLICIES[2]):
        assert optimizer.telemetry()["scale"] != 1.0


class Sharp(torch.optim.Optimizer):
    """A sharpness-aware optimizer with a separate method for each of its two steps, as in the usual wrapper."""

    def __init__(self, parameters: Any, base: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        self.base.step()
        self.zero_grad()


def test_a_wrapper_that_steps_by_other_methods_is_named_once(caplog):
    model = network()
    optimizer = TulaOptimizer(Sharp(model.parameters(), torch.optim.SGD, lr=0.05))
    data = micro_batches()
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            backward(model, data, 2)
            optimizer.first_step()
            backward(model, data, 2)
            optimizer.second_step()
    (sentence,) = sentences(caplog)
    assert "call its step()" in sentence


def test_sharpness_aware_steps_around_a_scaled_optimizer_are_scaled(caplog):
    model = network()
    made = []

    def base(groups: Any, **options: Any) -> TulaOptimizer:
        made.append(TulaOptimizer(torch.optim.SGD(groups, **options), global_batch_size=32, small_batch_size=8))
        return made[0]

    optimizer = Sharp(model.parameters(), base, lr=0.05)
    data = micro_batches()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            backward(model, data)
            optimizer.first_step()
            backward(model, data)
            optimizer.second_step()
    assert not [sentence for sentence in sentences(caplog) if "call its step()" in sentence]
    assert made[0].telemetry()["scale"] > 1.5


def test_gradients_without_a_backward_pass_over_the_parameters_are_named_once(caplog):
    model = network()
    optimizer = TulaOptimizer(sgd(model))

    def loss(parameters: Any, inputs: Any, labels: Any) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, inputs), labels)

    with caplog.at_level(logging.WARNING):
        for inputs, labels in (batch for batch, _ in zip(micro_batches(), range(20), strict=False)):
            given = {name: p.detach() for name, p in model.named_parameters()}
            gradients = torch.func.grad(loss)(given, inputs, labels)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].detach()
            optimizer.step()
            optimizer.zero_grad()
    (sentence,) = sentences(caplog)
    assert "torch.func" in sentence


CHANGES: dict[str, Callable[[float], float]] = {
    "relative": lambda rate: rate * 1.01,
    "by a sum": lambda rate: rate + 5e-4,
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_rate_that_the_wrapped_optimizer_changes_keeps_its_change_in_proportion(change, as_tensor, caplog):
    class OwnRate(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            (group,) = self.param_groups
            rate = CHANGES[change](group["lr"])
            if as_tensor:
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
            return result

    model = network()
    inner = OwnRate(model.parameters(), lr=torch.tensor(0.05) if as_tensor else 0.05, foreach=False)
    optimizer = TulaOptimizer(inner, global_batch_size=32)
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, 50, micro_batches())
    assert optimizer.telemetry()["scale"] > 1.5
    rate, alone = float(optimizer.param_groups[0]["lr"]), 0.05
    for _ in range(50):
        alone = CHANGES[change](alone)
    if change == "relative":
        assert rate == pytest.approx(alone, rel=1e-4)
    assert 0.05 < rate <= alone * 1.0001
    assert [sentence for sentence in sentences(caplog) if "learning rate within step" in sentence] or as_tensor


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deep_copy_continues_bit_for_bit_and_apart(policy):
    model = network()
    optimizer = TulaOptimizer(sgd(model), policy=policy, small_batch_size=8, global_batch_size=32)
    train(model, optimizer, 10, micro_batches())
    optimizer.zero_grad()
    twin, copied = copy.deepcopy((model, optimizer))
    before = weights(twin)
    train(model, optimizer, 6, micro_batches(seed=2))
    assert torch.equal(weights(twin), before)
    train(twin, copied, 6, micro_batches(seed=2))
    assert torch.equal(weights(model), weights(twin))
    assert copied.telemetry() == optimizer.telemetry()


# Several ranks.


@pytest.fixture(scope="module")
def of_two_ranks(results_of_ranks: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    return results_of_ranks(2, Path(__file__).with_name("beside_job.py"))


def test_no_reduction_is_in_flight_once_a_step_on_cpus_has_returned(of_two_ranks):
    """gloo aborts a process that ends during a reduction, and any step may be the last one of the script."""
    assert not any(result["early"] for result in of_two_ranks)


def test_sgd_inside_a_zero_redundancy_optimizer_takes_the_factor_of_sgd(of_two_ranks):
    first, second = of_two_ranks
    assert first["zero"] == second["zero"]
    assert first["zero"]["scales"] == first["sgd"]["scales"]
    assert first["zero"]["scales"][0] > 2.0


def test_two_scaled_optimizers_of_one_model_keep_ranks_equal(of_two_ranks):
    first, second = of_two_ranks
    assert first["matrices_apart"] == second["matrices_apart"]
    assert all(scale > 1.0 for scale in first["matrices_apart"]["scales"])


def test_the_agents_columns_of_two_scaled_optimizers_have_names_of_their_own():
    model, tracked = network(), TrackedObjects()
    optimizers = [TulaOptimizer(torch.optim.SGD(layer.parameters(), lr=0.05)) for layer in (model[0], model[2])]
    tracked.add([model], optimizers)
    data = micro_batches()
    for _ in range(6):
        backward(model, data)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = dict(tracked.changed_values())
    assert values["grad_norm"] == optimizers[0].telemetry()["grad_norm"]
    assert values["grad_norm_2"] == optimizers[1].telemetry()["grad_norm"]
    assert values["scale_2"] == optimizers[1].telemetry()["scale"]
