"""Tests that no step dominates the averages of the gradient noise, and that sudden jumps in gradients are clipped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.scaling import TulaOptimizer
from tula_agent.scaling.noise import NoiseAverage, noise_gain
from tula_agent.scaling.rule import SpikeClip

SAMPLES = 8.0


def step(signal: float, noise: float) -> tuple[float, float, float]:
    """Return the expected squared norms of a part's gradient and of the mean gradient, and the number of parts.

    The arguments are |G|^2 (`signal`) and S/B (`noise`).
    """
    return signal + noise * SAMPLES, signal + noise, SAMPLES


def averaged(*steps: tuple[float, float]) -> NoiseAverage:
    average = NoiseAverage()
    for signal, noise in steps:
        average.update(*step(signal, noise))
    return average


@given(st.floats(0.01, 1e3), st.floats(0.01, 1e3), st.floats(1.0, 64.0), st.floats(0.5, 8.0))
def test_the_gain_of_equal_steps_is_the_gain_of_one_of_them(signal, noise, ratio, weight):
    average = averaged(*[(signal, noise)] * 12)
    assert average.gain(ratio, weight) == pytest.approx(noise_gain(signal, weight * noise, ratio), rel=1e-6)
    assert average.noise_scale_over_batch == pytest.approx(noise / signal, rel=1e-6)


@given(st.floats(1e-6, 1e6))
def test_the_gain_depends_on_the_share_of_noise_and_not_on_the_length_of_gradients(size):
    lengths = averaged((1.0, 2.0), (size, 2.0 * size), (1.0, 2.0))
    assert lengths.gain(8.0) == pytest.approx(averaged(*[(1.0, 2.0)] * 3).gain(8.0), rel=1e-6)


def test_the_gain_falls_within_two_steps_of_low_noise_and_rises_slowly():
    noisy, calm = (0.1, 0.9), (0.9, 0.1)
    before = averaged(*[noisy] * 50)
    fallen = averaged(*[noisy] * 50, calm, calm)
    risen = averaged(*[calm] * 50, noisy, noisy)
    high, low = before.gain(8.0), averaged(*[calm] * 50).gain(8.0)
    assert high - fallen.gain(8.0) > 0.3 * (high - low)
    assert risen.gain(8.0) - low < 0.5 * (high - low)


def test_changing_the_batch_divides_the_noise_by_its_factor():
    average = averaged(*[(1.0, 2.0)] * 5)
    average.change_batch(4.0)
    assert average.gain(8.0) == pytest.approx(averaged(*[(1.0, 0.5)] * 5).gain(8.0))
    assert average.noise_scale_over_batch == pytest.approx(0.5)


def lengths_after(limit: SpikeClip, *lengths: float, clip: bool = True) -> list[float]:
    found = []
    for length in lengths:
        gradients = [torch.full((4,), length / 4), None, torch.full((3, 4), length / 4)]
        limit(gradients, clip=clip)
        found.append(float(torch.cat([g.reshape(-1) for g in gradients if g is not None]).norm()))
    return found


def test_spike_clip_shortens_to_twice_the_usual_length_and_follows_a_lasting_rise():
    assert lengths_after(SpikeClip(2.0), 1.0, 1.9, 1.0) == pytest.approx([1.0, 1.9, 1.0])
    assert lengths_after(SpikeClip(2.0), 1.0, 100.0) == pytest.approx([1.0, 2.0])
    # A lasting rise: a tenth longer every step.
    followed = lengths_after(SpikeClip(2.0), 1.0, *[100.0] * 60)
    assert followed[:4] == pytest.approx([1.0, 2.0, 2.2, 2.42])
    assert followed[-1] == pytest.approx(100.0)


def test_spike_clip_keeps_every_bit_of_usual_gradients_and_of_all_with_clip_off():
    limit = SpikeClip(2.0)
    for length in (1.0, 1.5):
        direction = torch.randn(5)
        gradients = [direction.mul_(length / direction.norm())]
        before = gradients[0].clone()
        limit(gradients, clip=True)
        assert torch.equal(gradients[0], before)
    assert lengths_after(SpikeClip(2.0), 1.0, 100.0, clip=False) == pytest.approx([1.0, 100.0])


def test_spike_clip_neither_changes_nor_remembers_infinite_and_zero_gradients():
    limit = SpikeClip(2.0)
    bad = [torch.tensor([math.inf, 1.0])]
    limit(bad, clip=True)
    assert math.isinf(float(bad[0][0]))
    assert lengths_after(limit, 0.0, 3.0, 100.0) == pytest.approx([0.0, 3.0, 6.0])
    limit([torch.tensor([math.nan])], clip=True)
    assert lengths_after(limit, 1.0) == pytest.approx([1.0])
    rested = SpikeClip(2.0)
    assert lengths_after(rested, 3.0, *[0.0] * 200, 3.0)[-1] == pytest.approx(3.0)


def test_spike_clip_ignores_sparse_gradients():
    limit = SpikeClip(2.0)
    sparse = torch.sparse_coo_tensor([[1]], [50.0], (4,), check_invariants=True)
    for dense in (torch.ones(1), torch.full((1,), 100.0)):
        limit([dense, sparse], clip=True)
    assert float(dense) == pytest.approx(2.0)
    assert float(sparse.to_dense().sum()) == 50.0


def test_spike_clip_reads_part_of_a_large_tensor_and_shortens_all_of_it():
    limit = SpikeClip(2.0)
    for length in (1.0, 1.0, 50.0):
        weight = torch.full((64, 64, 5, 5), length).contiguous(memory_format=torch.channels_last)
        limit([weight, torch.full((3,), length)], clip=True)
    torch.testing.assert_close(weight, torch.full_like(weight, 2.0))


def test_a_larger_batch_of_the_same_launch_reads_the_same_noise_scale_at_once():
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.zeros(64))
    optimizer = TulaOptimizer(torch.optim.SGD([weight], lr=0.0), policy="measure")
    found = {}
    for rows in (4, 16):
        for _step in range(32 if rows == 4 else 2):
            for _ in range(8):
                batch = 0.1 + torch.randn(rows, 64)
                optimizer.observe_batch(batch)
                ((batch @ weight).mean() / 8).backward()  # of noise scale 1 / 0.1^2 = 100
            optimizer.step()
            optimizer.zero_grad()
        found[rows] = optimizer.telemetry()["gradient_noise_scale"]
    assert found[16] == pytest.approx(found[4], rel=0.4)
