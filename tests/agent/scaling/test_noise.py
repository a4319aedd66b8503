"""What the gain rests on: averages that one step cannot rule, and a limit on gradients that jump."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.scaling import TulaOptimizer
from tula_agent.scaling.noise import NoiseAverage
from tula_agent.scaling.policy import noise_gain
from tula_agent.scaling.spikes import SpikeLimit

SAMPLES = 8.0


def step(signal: float, noise: float) -> tuple[float, float, float]:
    """Squared norms as measured where |G|^2 = `signal` and S/B = `noise`, without chance."""
    return signal + noise * SAMPLES, signal + noise, SAMPLES


def averaged(*steps: tuple[float, float]) -> NoiseAverage:
    average = NoiseAverage()
    for signal, noise in steps:
        assert average.update(*step(signal, noise))
    return average


@given(st.floats(0.01, 1e3), st.floats(0.01, 1e3), st.floats(1.0, 64.0), st.floats(0.5, 8.0))
def test_of_equal_steps_the_gain_is_that_of_one(signal, noise, ratio, weight):
    average = averaged(*[(signal, noise)] * 12)
    assert average.gain(ratio, weight) == pytest.approx(noise_gain(signal, weight * noise, ratio), rel=1e-6)
    assert average.noise_scale_over_batch == pytest.approx(noise / signal, rel=1e-6)


@given(st.floats(1e-6, 1e6))
def test_how_long_gradients_are_does_not_matter_only_how_much_of_them_is_noise(size):
    lengths = averaged((1.0, 2.0), (size, 2.0 * size), (1.0, 2.0))
    assert lengths.gain(8.0) == pytest.approx(averaged(*[(1.0, 2.0)] * 3).gain(8.0), rel=1e-6)


def test_a_gain_falls_within_two_steps_of_agreement_and_rises_slowly():
    noisy, calm = (0.1, 0.9), (0.9, 0.1)
    before = averaged(*[noisy] * 50)
    fallen = averaged(*[noisy] * 50, calm, calm)
    risen = averaged(*[calm] * 50, noisy, noisy)
    high, low = before.gain(8.0), averaged(*[calm] * 50).gain(8.0)
    assert high - fallen.gain(8.0) > 0.3 * (high - low)
    assert risen.gain(8.0) - low < 0.5 * (high - low)


def test_a_larger_batch_has_less_noise_by_its_factor():
    average = averaged(*[(1.0, 2.0)] * 5)
    average.change_batch(4.0)
    assert average.gain(8.0) == pytest.approx(averaged(*[(1.0, 0.5)] * 5).gain(8.0))
    assert average.noise_scale_over_batch == pytest.approx(0.5)


def lengths_after(limit: SpikeLimit, *lengths: float, shorten: bool = True) -> list[float]:
    found = []
    for length in lengths:
        gradients = [torch.full((4,), length / 4), None, torch.full((3, 4), length / 4)]
        limit(gradients, shorten=shorten)
        found.append(float(torch.cat([g.reshape(-1) for g in gradients if g is not None]).norm()))
    return found


def test_a_gradient_twice_as_long_as_usual_is_the_longest_that_passes():
    assert lengths_after(SpikeLimit(2.0), 1.0, 1.9, 1.0) == pytest.approx([1.0, 1.9, 1.0])
    assert lengths_after(SpikeLimit(2.0), 1.0, 100.0) == pytest.approx([1.0, 2.0])
    # A lasting rise is followed: a tenth longer every step.
    followed = lengths_after(SpikeLimit(2.0), 1.0, *[100.0] * 60)
    assert followed[:4] == pytest.approx([1.0, 2.0, 2.2, 2.42])
    assert followed[-1] == pytest.approx(100.0)


def test_what_passes_keeps_every_bit_and_without_shortening_all_does():
    limit = SpikeLimit(2.0)
    for length in (1.0, 1.5):
        direction = torch.randn(5)
        gradients = [direction.mul_(length / direction.norm())]
        before = gradients[0].clone()
        limit(gradients, shorten=True)
        assert torch.equal(gradients[0], before)
    assert lengths_after(SpikeLimit(2.0), 1.0, 100.0, shorten=False) == pytest.approx([1.0, 100.0])


def test_a_gradient_that_is_not_finite_or_zero_passes_and_is_not_remembered():
    limit = SpikeLimit(2.0)
    bad = [torch.tensor([math.inf, 1.0])]
    limit(bad, shorten=True)
    assert math.isinf(float(bad[0][0]))
    assert lengths_after(limit, 0.0, 3.0, 100.0) == pytest.approx([0.0, 3.0, 6.0])
    limit([torch.tensor([math.nan])], shorten=True)
    assert lengths_after(limit, 1.0) == pytest.approx([1.0])
    rested = SpikeLimit(2.0)
    assert lengths_after(rested, 3.0, *[0.0] * 200, 3.0)[-1] == pytest.approx(3.0)


def test_sparse_gradients_are_left_alone():
    limit = SpikeLimit(2.0)
    sparse = torch.sparse_coo_tensor([[1]], [50.0], (4,), check_invariants=True)
    for dense in (torch.ones(1), torch.full((1,), 100.0)):
        limit([dense, sparse], shorten=True)
    assert float(dense) == pytest.approx(2.0)
    assert float(sparse.to_dense().sum()) == 50.0


def test_of_a_large_tensor_a_fixed_part_tells_and_all_of_it_is_shortened():
    limit = SpikeLimit(2.0)
    for length in (1.0, 1.0, 50.0):
        weight = torch.full((64, 64, 5, 5), length).contiguous(memory_format=torch.channels_last)
        limit([weight, torch.full((3,), length)], shorten=True)
    torch.testing.assert_close(weight, torch.full_like(weight, 2.0))


def test_a_limit_that_would_shorten_everything_is_refused():
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="spike_limit is 1"):
        TulaOptimizer(torch.optim.SGD([parameter], lr=0.1), spike_limit=1.0)
