"""Tests that a step's singular directions above the noise get equal lengths, and that the step's length is unchanged.

Without an estimate of the noise, the direction must be that of SGD.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.agent.scaling.constants import gain
from tula_agent.scaling import Gain, Measure, TulaOptimizer
from tula_agent.scaling.direction import (
    DEVICE_COST,
    MOST_OPERATIONS,
    ROWS,
    affordable,
    corrections,
    matrix_shape,
    newton_inverse_root,
    noise_level,
    sgd_update,
)


def exact_root(matrix: torch.Tensor) -> torch.Tensor:
    """Return `matrix` to the power -1/2, computed from its eigenvectors in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.rsqrt()) @ vectors.T


def exact_direction(update: torch.Tensor, level: float) -> torch.Tensor:
    """Return the direction that the first equation of `direction.py` defines, in float64."""
    wide = update.double()
    direction = exact_root(wide @ wide.T + level * torch.eye(len(wide))) @ wide
    return direction * (wide.norm() / direction.norm())


def spread(rows: int, columns: int, *, decades: float, seed: int = 0) -> torch.Tensor:
    """Return a random matrix with singular values from 1 down to 10^-decades."""
    draw = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, rows, generator=draw))[0]
    right = torch.linalg.qr(torch.randn(columns, rows, generator=draw))[0]
    return left @ torch.diag(torch.logspace(0, -decades, rows)) @ right.T


def turned(update: torch.Tensor, level: float) -> torch.Tensor:
    """Return the direction D of one matrix."""
    return update + corrected(update[None], level)[0]


def corrected(updates: torch.Tensor, *levels: float) -> torch.Tensor:
    """Return D - U, the change of direction, for each matrix and its noise level."""
    return torch.stack(corrections([*updates], torch.tensor(levels)))


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 40), st.integers(0, 60), st.floats(-4.0, 1.0), st.floats(-10.0, 10.0), st.integers(0, 99))
def test_the_direction_is_the_equation_of_the_module_at_any_length(rows, more, level, length, seed):
    update = spread(rows, rows + more, decades=3.0, seed=seed) * 10.0**length
    nu = 10.0**level * float(update.double().square().sum())
    found = turned(update, nu)
    assert relative(found, exact_direction(update, nu)) < 0.005
    assert float(found.norm()) == pytest.approx(float(update.norm()), rel=1e-5)


def test_the_longer_side_of_more_than_256_rows_is_turned_in_blocks_of_rows():
    update = torch.randn(ROWS + 44, 400, generator=torch.Generator().manual_seed(0))
    nu = 0.001 * float(update.square().sum())
    found = turned(update, nu)
    blocks = update.double().split(150)
    roots = [exact_root(block @ block.T + nu * torch.eye(150)) @ block for block in blocks]
    right = torch.cat(roots)
    assert relative(found, right * (float(update.norm()) / right.norm())) < 1e-3


@pytest.mark.parametrize("interface", ["precision", "allow_tf32", "fp32_precision"])
def test_a_script_that_lets_products_be_rounded_keeps_its_setting(interface):
    update = spread(6, 9, decades=1.0)
    right, matmul = turned(update, 0.1), torch.backends.cuda.matmul
    before = getattr(matmul, "fp32_precision", None)
    if interface == "precision":
        torch.set_float32_matmul_precision("high")
    elif interface == "allow_tf32":
        matmul.allow_tf32 = True
    elif hasattr(matmul, "fp32_precision"):
        matmul.fp32_precision = "tf32"  # which makes torch.get_float32_matmul_precision() raise
    else:
        pytest.skip("this torch knows no such setting")
    host = getattr(torch.backends.mkldnn, "matmul", None)
    allowed = getattr(host, "fp32_precision", None)
    try:
        torch.testing.assert_close(turned(update, 0.1), right)
        assert getattr(host, "fp32_precision", None) == allowed
        if interface != "fp32_precision":
            assert torch.get_float32_matmul_precision() == "high"
        else:
            assert matmul.fp32_precision == "tf32"
    finally:
        if interface != "fp32_precision":
            torch.set_float32_matmul_precision("highest")
        else:
            matmul.fp32_precision = before


def test_singular_values_are_levelled_without_noise_and_stay_under_much():
    update = spread(12, 30, decades=2.0)
    levelled, kept = turned(update, 0.0), turned(update, 1e3)
    values = torch.linalg.svdvals(levelled)
    assert float(values.max() / values.min()) < 1.02
    torch.testing.assert_close(kept, update, rtol=0.0, atol=1e-3)


def test_where_noise_dominates_the_step_keeps_every_bit():
    update = spread(12, 30, decades=2.0)
    assert not corrected(update[None], 1e5).any()


@pytest.mark.parametrize("level", [math.nan, math.inf])
def test_an_unknown_level_keeps_the_step(level):
    assert not corrected(torch.randn(1, 4, 6), level).any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_keeps_its_step_and_spoils_no_other(value):
    updates = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    updates[1, 2, 3] = value
    found = corrected(updates, 0.1, 0.1, 0.1)
    assert not found[1].any()
    torch.testing.assert_close(found[::2], corrected(updates[::2], 0.1, 0.1))


def test_zeros_and_matrices_of_rank_one_keep_their_steps():
    zeros, single = torch.zeros(5, 8), torch.outer(torch.arange(1.0, 6.0), torch.arange(1.0, 9.0))
    found = corrected(torch.stack([zeros, single]), 0.0, 0.0)
    assert not found[0].any()
    assert float(found[1].norm()) < 0.02 * float(single.norm())


@pytest.mark.parametrize("condition", [1e2, 1e4, 9e5])
def test_the_iteration_for_gpus_finds_the_inverse_root_of_what_it_may_get(condition):
    basis = torch.linalg.qr(torch.randn(3, 40, 40, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.logspace(0, -math.log10(condition), 40)
    matrices = (basis * values) @ basis.mT
    matrices = (matrices + matrices.mT) / 2
    right = torch.stack([exact_root(matrix) for matrix in matrices])
    assert relative(newton_inverse_root(matrices), right) < 3e-8 * condition + 1e-4


def test_the_noise_level_spreads_the_noise_of_the_momentum_buffer_over_the_rows():
    """The buffer has 1 / (1 - mu^2) times a step's noise; the level is a quarter of its mean squared norm per row."""
    draw = torch.Generator().manual_seed(0)
    buffer = torch.zeros(20, 50)
    squares = []
    for step in range(400):
        buffer = 0.9 * buffer + torch.randn(20, 50, generator=draw)
        if step >= 50:
            squares.append(float(buffer.square().sum()) / 20)
    assert noise_level(1000.0, 0.9, 20) == pytest.approx(0.25 * sum(squares) / len(squares), rel=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
        {"maximize": True},
    ],
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_update_is_what_the_weight_lost_by_the_step_over_the_rate(options, weight_decay):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=0.3, weight_decay=weight_decay, **options)
    for _ in range(3):
        before = weight.detach().clone()
        weight.grad = torch.randn_like(weight)
        sgd.step()
        buffer = sgd.state[weight].get("momentum_buffer")
        with torch.no_grad():
            found = sgd_update(weight, sgd.param_groups[0], buffer, 0.3)
        torch.testing.assert_close(found, (before - weight.detach()) / 0.3)


def test_what_is_no_matrix_has_no_direction():
    shapes = [(), (5,), (1, 9), (9, 1), (0, 4)]
    assert [matrix_shape(torch.empty(shape)) for shape in shapes] == [None] * len(shapes)
    assert matrix_shape(torch.empty(4, 4, dtype=torch.int64)) is None
    depthwise, tall = matrix_shape(torch.empty(12, 1, 3, 3)), matrix_shape(torch.empty(30, 4))
    assert depthwise is not None
    assert tall is not None
    assert (depthwise.rows, depthwise.columns, depthwise.transposed) == (9, 12, True)
    assert (tall.rows, tall.columns, tall.transposed) == (4, 30, True)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("batch_size", [8, 64, 1024])
def test_the_largest_matrices_are_left_out_until_the_rest_costs_a_twentieth_of_a_step(host, batch_size):
    found = [matrix_shape(torch.empty(n, n, device="meta")) for n in (1024, 16, 256, 64)]
    shapes = tuple(shape for shape in found if shape is not None)
    chosen = affordable(shapes, batch_size, host=host)
    allowed = MOST_OPERATIONS * batch_size * sum(shape.operations_of_an_example for shape in shapes)
    costs = [shape.operations(host=host) * (1 if host else DEVICE_COST) for shape in shapes]
    cost = sum(turning for turning, use in zip(costs, chosen, strict=True) if use)
    assert cost <= allowed
    rows = [shape.rows for shape, use in zip(shapes, chosen, strict=True) if use]
    assert sorted(rows) == sorted(shape.rows for shape in shapes)[: len(rows)]
    left = [turning for turning, use in zip(costs, chosen, strict=True) if not use]
    assert not left or cost + min(left) > allowed
    assert affordable(shapes, None, host=host) == (True,) * 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def trained(
    policy: Gain,
    *,
    steps: int = 12,
    turned: bool = True,
    inner: type = torch.optim.SGD,
    autocast: bool = False,
    rate: float | torch.Tensor = 0.01,
) -> nn.Sequential:
    """Train a small network in steps of four micro-steps and return it; the batch is eight times the small batch."""
    net = network()
    options = {"momentum": 0.9} if inner is torch.optim.SGD else {}
    sgd = inner([{"params": list(net.parameters()), "direction": turned}], lr=rate, **options)
    optimizer = TulaOptimizer(sgd, global_batch_size=64, small_batch_size=8, policy=policy)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        images, labels = torch.randn(64, 1, 8, 8, generator=draw), torch.randint(5, (64,), generator=draw)
        for part in range(4):
            chunk = slice(16 * part, 16 * part + 16)
            (nn.functional.cross_entropy(net(images[chunk]), labels[chunk]) / 4).backward()
        with torch.autocast("cpu", enabled=autocast):
            optimizer.step()
    return net


def test_matrices_are_turned_by_default_and_a_group_or_a_rule_can_leave_them():
    default, plain = trained(Gain()), trained(gain(damping=None))
    assert not torch.equal(default[0].weight, plain[0].weight)
    assert not torch.equal(default[3].weight, plain[3].weight)
    left = trained(Gain(), turned=False)
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_is_a_tensor_turns_steps_as_a_number_does(shape):
    number, tensor = trained(Gain(), steps=4), trained(Gain(), steps=4, rate=torch.full(shape, 0.01))
    for expected, weight in zip(number.parameters(), tensor.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)


def test_a_step_inside_autocast_is_turned_in_full_precision():
    plain = trained(Gain(), steps=4)
    inside = trained(Gain(), steps=4, autocast=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), inside.parameters(), strict=True))


def test_the_tables_of_embeddings_are_recognised_and_keep_their_steps():
    nets = []
    for policy in (Gain(), gain(damping=None)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(12, 6), nn.Flatten(), nn.Linear(18, 6))
        optimizer = TulaOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
            global_batch_size=1024,
            small_batch_size=64,
            policy=policy,
        )
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(4):
                loss = nn.functional.cross_entropy(net(torch.randint(12, (256, 3))), torch.randint(6, (256,)))
                (loss / 4).backward()
            optimizer.step()
        nets.append(net)
        if policy.damping is not None:
            assert len(noises(optimizer)) == 1, "only the linear layer's noise is measured by itself"
    turned, plain = nets
    assert not torch.equal(turned[2].weight, plain[2].weight)
    assert torch.equal(turned[0].weight, plain[0].weight)


def normalized(policy: Gain, *, ratio: int, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> tuple:
    """Return a network with `norm` and its optimizer, whose global batch is `ratio` times the base batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), norm(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5))
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, TulaOptimizer(sgd, global_batch_size=16 * ratio, small_batch_size=16, policy=policy)


def take_steps(net: nn.Module, optimizer: TulaOptimizer, *, ratio: int, steps: int = 3) -> list[torch.Tensor]:
    """Train for `steps` steps with `ratio` times the base batch; return copies of the weights."""
    draw = torch.Generator().manual_seed(ratio)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(4):
            images = torch.randn(4 * ratio, 1, 8, 8, generator=draw)
            labels = torch.randint(5, (4 * ratio,), generator=draw)
            (nn.functional.cross_entropy(net(images), labels) / 4).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


class OwnNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalization of a library, which derives from none of the public classes."""

    def _check_input_dim(self, input):
        pass


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm, OwnNorm])
@pytest.mark.parametrize("ratio", [2, 4])
def test_with_batch_normalization_up_to_four_times_the_base_batch_the_step_keeps_its_direction(norm, ratio):
    """At twice the base batch, the factor also grows so slowly that it reaches B / b after 88 base batches."""
    net, optimizer = normalized(Gain(), ratio=ratio, norm=norm)
    default = take_steps(net, optimizer, ratio=ratio)
    growth = 2.0 ** (2 / 88) if ratio == 2 else 1.1
    plain = take_steps(*normalized(gain(damping=None, growth=growth), ratio=ratio, norm=norm), ratio=ratio)
    assert all(torch.equal(a, b) for a, b in zip(default, plain, strict=True))
    assert optimizer.telemetry()["scale"] == pytest.approx(growth**2), "after two measurements"
    assert optimizer.telemetry()["directions"] == 0.0


@pytest.mark.parametrize(("norm", "ratio"), [(nn.BatchNorm2d, 5), (lambda channels: nn.GroupNorm(2, channels), 4)])
def test_above_four_times_the_base_batch_or_without_batch_normalization_steps_are_turned(norm, ratio):
    net, optimizer = normalized(Gain(), ratio=ratio, norm=norm)
    default = take_steps(net, optimizer, ratio=ratio)
    plain = take_steps(*normalized(gain(damping=None), ratio=ratio, norm=norm), ratio=ratio)
    assert not torch.equal(default[0], plain[0])
    assert optimizer.telemetry()["scale"] == pytest.approx(1.1**2)


@pytest.mark.parametrize("ratio", [2, 8])
def test_a_normalized_network_that_is_resumed_between_two_measurements_continues_bit_for_bit(ratio):
    seldom = gain(measure_every=8)
    net, optimizer = normalized(seldom, ratio=ratio)
    take_steps(net, optimizer, ratio=ratio, steps=10)
    resumed, wrapped = normalized(seldom, ratio=ratio)
    resumed.load_state_dict(net.state_dict())
    wrapped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = take_steps(net, optimizer, ratio=ratio)
    found = take_steps(resumed, wrapped, ratio=ratio)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert wrapped.telemetry()["scale"] == optimizer.telemetry()["scale"]
    assert wrapped.telemetry()["directions"] == 0.0


def test_turning_ends_when_the_batch_of_a_normalized_network_falls_to_four_times_the_base_batch():
    ends = []
    for policy in (gain(measure_every=8), gain(measure_every=8, damping=None)):
        net, optimizer = normalized(gain(measure_every=8), ratio=8)
        take_steps(net, optimizer, ratio=8, steps=10)
        then, wrapped = normalized(policy, ratio=4)
        then.load_state_dict(net.state_dict())
        wrapped.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        ends.append(take_steps(then, wrapped, ratio=4, steps=10))
    turned, plain = ends
    assert all(torch.equal(a, b) for a, b in zip(turned, plain, strict=True))


def stepped_with_embedding(table: nn.Embedding) -> None:
    """Take two steps of a model with this embedding table; the second step is measured."""
    net = nn.Sequential(table, nn.Flatten(), nn.Linear(18, 6))
    optimizer = TulaOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), global_batch_size=8, small_batch_size=4)
    for _ in range(2):
        net(torch.randint(12, (4, 3))).square().mean().backward()
    optimizer.step()


def test_the_search_for_embeddings_runs_no_code_of_a_parametrized_module():
    class Counting(nn.Module):
        calls = 0

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return weight

    counting = Counting()
    table = nn.Embedding(12, 6)
    nn.utils.parametrize.register_parametrization(table, "weight", counting)
    before = counting.calls
    stepped_with_embedding(table)
    assert counting.calls == before + 2, "once in each forward pass"


def test_a_model_that_is_hidden_from_the_garbage_collector_is_warned_of(caplog):
    stepped_with_embedding(nn.Embedding(12, 6))
    assert "gc.freeze" not in caplog.text
    table = nn.Embedding(12, 6)
    gc.freeze()
    try:
        stepped_with_embedding(table)
    finally:
        gc.unfreeze()
    assert "call gc.freeze() after the first optimizer step" in caplog.text
    assert "put the weights of embeddings into a parameter group with direction=False" in caplog.text


def test_a_grad_scaler_changes_no_bit_of_turned_steps_and_a_skipped_step_leaves_no_trace():
    def after(scaled: bool) -> tuple[nn.Sequential, list[float]]:
        net = network()
        sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        optimizer = TulaOptimizer(sgd, global_batch_size=64, small_batch_size=8)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6, enabled=scaled)
        draw = torch.Generator().manual_seed(1)
        for step in range(8):
            optimizer.zero_grad()
            images, labels = torch.randn(64, 1, 8, 8, generator=draw), torch.randint(5, (64,), generator=draw)
            overflows = step == 5
            if overflows and not scaled:
                continue
            for part in range(4):
                chunk = slice(16 * part, 16 * part + 16)
                loss = nn.functional.cross_entropy(net(images[chunk]), labels[chunk]) / 4
                scaler.scale(loss * math.inf if overflows else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return net, noises(optimizer)

    (with_scaler, noise), (without, expected) = after(True), after(False)
    assert all(torch.equal(a, b) for a, b in zip(with_scaler.parameters(), without.parameters(), strict=True))
    assert noise == expected


def test_the_first_turned_step_leaves_vectors_alone():
    default, plain = trained(Gain(), steps=2), trained(gain(damping=None), steps=2)
    assert not torch.equal(default[3].weight, plain[3].weight)
    assert torch.equal(default[0].bias, plain[0].bias)
    assert torch.equal(default[3].bias, plain[3].bias)


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.ASGD])
def test_the_steps_of_other_optimizers_keep_their_directions(inner):
    default, plain = trained(Gain(), inner=inner), trained(gain(damping=None), inner=inner)
    assert all(torch.equal(a, b) for a, b in zip(default.parameters(), plain.parameters(), strict=True))


def noises(optimizer: TulaOptimizer) -> list[float]:
    """Return the noise V of each matrix from the end of a checkpoint, where all other parameters have NaN."""
    parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    by_parameter: list[float] = optimizer.state_dict()["param_groups"][0]["tula"].tolist()[-parameters:]
    return [noise for noise in by_parameter if not math.isnan(noise)]


def noises_after(
    steps: int, *, loss_scale: float = 1.0, clip: float | None = None, parts: int = 4
) -> list[list[float]]:
    """Return the noise V of each matrix after each step; each element of the mean has the variance 1 / `parts`."""
    large, small = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(2, 4))
    optimizer = TulaOptimizer(torch.optim.SGD([large, small], lr=0.0, momentum=0.9), global_batch_size=8 * parts)
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(parts):
            loss = (large * (1.0 + torch.randn(4, 6, generator=draw))).sum()
            loss = loss + (small * torch.randn(2, 4, generator=draw)).sum()
            (loss * loss_scale / parts).backward()
        for parameter in (large, small):
            assert parameter.grad is not None
            parameter.grad /= loss_scale
        if clip is not None:
            nn.utils.clip_grad_norm_([large, small], clip)
        optimizer.step()
        found.append(noises(optimizer))
    return found


@pytest.mark.parametrize("parts", [2, 8])
def test_the_noise_of_each_tensor_is_measured_without_bias(parts):
    measured = torch.tensor(noises_after(400, parts=parts)[20:]).mean(0)
    # 24 and 8 elements, each with variance 1 / parts. Negative estimates count as 0, hence a few percent more.
    torch.testing.assert_close(measured * parts, torch.tensor([24.0, 8.0]), rtol=0.15, atol=0.0)


def test_a_loss_scale_does_not_change_the_noise_and_a_clip_changes_it_as_it_changes_gradients():
    plain, scaled = noises_after(10), noises_after(10, loss_scale=1024.0)
    torch.testing.assert_close(torch.tensor(scaled), torch.tensor(plain), rtol=1e-4, atol=0.0)
    clipped = torch.tensor(noises_after(60, clip=0.5)[20:]).mean(0)
    # All gradients are clipped, from a length of sqrt(24 + 32 / 4) = 5.7: the noise falls with the square.
    unclipped = torch.tensor(noises_after(60)[20:]).mean(0)
    torch.testing.assert_close(clipped * 32.0 / 0.25, unclipped, rtol=0.2, atol=0.0)


def test_a_job_resumed_with_twice_the_batch_has_half_the_noise():
    net = network()

    def wrapped(batch_size: int) -> TulaOptimizer:
        sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        return TulaOptimizer(sgd, global_batch_size=batch_size, small_batch_size=8)

    optimizer = wrapped(32)
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(4):
            images, labels = torch.randn(8, 1, 8, 8), torch.randint(5, (8,))
            (nn.functional.cross_entropy(net(images), labels) / 4).backward()
        optimizer.step()
    resumed = wrapped(64)
    resumed.load_state_dict(optimizer.state_dict())
    assert noises(resumed) == pytest.approx([value / 2 for value in noises(optimizer)])


def test_matrices_that_cost_too_much_are_left_with_one_warning(caplog):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 300), nn.ReLU(), nn.Linear(300, 300))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = TulaOptimizer(sgd, global_batch_size=16, small_batch_size=4)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(2):
            (net(torch.randn(8, 6)).square().mean() / 2).backward()
        optimizer.step()
        assert optimizer.telemetry()["directions"] == 0.0, "from the first step on"
    assert not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    (record,) = [record for record in caplog.records if "largest matrices" in record.message]
    assert "twentieth" in record.message


@pytest.mark.parametrize(
    ("policy", "inner", "wanted", "reported"),
    [
        (Gain(), torch.optim.SGD, True, 1.0),
        (Gain(), torch.optim.SGD, False, 0.0),
        (Gain(), torch.optim.AdamW, True, 0.0),
        (Measure(), torch.optim.SGD, True, 0.0),
        (gain(damping=None), torch.optim.SGD, True, 0.0),
    ],
)
def test_the_telemetry_says_from_the_first_step_on_whether_matrices_are_turned(policy, inner, wanted, reported):
    net = network()
    optimizer = TulaOptimizer(
        inner([{"params": list(net.parameters()), "direction": wanted}], lr=0.01),
        policy=policy,
        global_batch_size=4,
        small_batch_size=2,
    )
    net(torch.randn(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    assert optimizer.telemetry()["directions"] == reported
    assert optimizer.telemetry()["small_batch_size"] == 2.0


def test_one_rank_without_micro_steps_also_reports_that_batch_normalization_keeps_the_directions():
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 5))
    optimizer = TulaOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), global_batch_size=64, small_batch_size=8)
    net(torch.randn(64, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    assert optimizer.telemetry()["directions"] == 0.0
