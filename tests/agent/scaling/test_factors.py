"""Tests that factors equal the reference, stay within their bounds and are finite for degenerate gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.agent.scaling.reference import ags_factor, gain_of_parts, variability
from tula_agent.scaling.ags import SensitivityGate, factor_from_squares
from tula_agent.scaling.noise import gradient_variability, noise_gain, noise_moments
from tula_agent.scaling.policies import Served
from tula_agent.scaling.ranks import owners, to_host
from tula_agent.scaling.taps import squares
from tula_agent.torch_private import norm_squared

POSITIVE = st.floats(1e-6, 1e6)


def pair(shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    large = torch.randn(shape, generator=draw)
    return large + 0.7 * torch.randn(shape, generator=draw), large


@pytest.mark.parametrize("shape", [(5,), (6, 4), (8, 3, 3, 3), ()])
def test_factors_equal_the_reference(shape):
    small, large = pair(shape)
    fast = factor_from_squares(squares(small, "element"), squares(large, "element"), s_min=1e-3, s_max=2.0)
    slow = ags_factor(small, large, s_min=1e-3, s_max=2.0)
    torch.testing.assert_close(fast.expand(shape), slow.expand(shape), rtol=2e-6, atol=1e-7)


@given(
    small=st.lists(st.floats(width=32), min_size=1, max_size=6),
    large=st.lists(st.floats(width=32), min_size=1, max_size=6),
)
def test_a_factor_is_finite_and_within_its_bounds_for_any_gradient(small, large):
    size = min(len(small), len(large))
    parts = torch.tensor(small[:size]), torch.tensor(large[:size])
    factor = factor_from_squares(squares(parts[0], "element"), squares(parts[1], "element"), s_min=0.01, s_max=4.0)
    assert torch.isfinite(factor).all()
    assert ((factor >= 0.01 - 1e-9) & (factor <= 4.0)).all()


def test_a_negative_gradient_next_to_eps_gives_no_nan():
    small, large = torch.tensor([0.0, 0.5]), torch.tensor([-1e-8, -1e-8])
    for factor in (
        ags_factor(small, large, s_min=1e-3, s_max=4.0),
        factor_from_squares(squares(small, "element"), squares(large, "element"), s_min=1e-3, s_max=4.0),
    ):
        assert torch.isfinite(factor).all()


def test_a_gradient_that_is_zero_everywhere_has_factor_one():
    zero = torch.zeros(3, 4)
    factor = factor_from_squares(squares(zero, "element"), squares(zero, "element"), s_min=1e-3, s_max=4.0)
    assert (factor == 1.0).all()


def test_variability_is_equation_5():
    now, before = [torch.tensor([3.0, 4.0])], [torch.tensor([1.0, 2.0])]
    assert variability(now, before) == pytest.approx(4.0)
    assert gradient_variability(float(norm_squared(now)), float(norm_squared(before))) == pytest.approx(4.0)
    assert math.isinf(gradient_variability(1.0, 0.0))


@given(st.lists(st.sampled_from([0.0, 1.0, 1.4, 2.0, 25.0, math.inf, math.nan]), min_size=2, max_size=6), POSITIVE)
def test_the_gate_on_the_device_closes_where_equation_5_reaches_delta(norms, delta):
    gate, before = SensitivityGate(), None
    for norm in norms:
        is_open = bool(gate(torch.tensor(norm, dtype=torch.float64), delta))
        if before is None or not math.isfinite(norm):
            assert not is_open  # nothing to compare with
        elif math.isfinite(before) and before > 0.0:
            assert is_open == (gradient_variability(norm, before) < delta)
        else:
            assert not is_open
        before = norm if before is None or math.isfinite(norm) else before


@given(st.lists(st.integers(0, 10**7), max_size=40).map(tuple), st.integers(1, 9))
def test_ranks_read_about_as_many_elements_each(sizes, ranks):
    found = owners(sizes, ranks)
    assert len(found) == len(sizes)
    loads = [sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(signal=st.floats(-1e6, 1e6), noise=st.floats(-1e6, 1e6), ratio=st.floats(1.0, 1e4))
@example(signal=0.0, noise=5e-324, ratio=1.5)  # a subnormal times 1.5 rounds to twice itself
def test_the_gain_lies_between_one_and_the_batch_ratio(signal, noise, ratio):
    assert 1.0 <= noise_gain(signal, noise, ratio) <= ratio


@given(signal=POSITIVE, noise=POSITIVE, more=st.floats(1.0, 100.0), ratio=st.floats(1.0, 1e3))
def test_the_gain_grows_with_noise_and_algorithm_1_takes_its_root(signal, noise, more, ratio):
    gain = noise_gain(signal, noise, ratio)
    assert noise_gain(signal, noise * more, ratio) >= gain * (1 - 1e-9)
    small_over_large = (signal + noise * ratio) / (signal + noise)  # E|g_small|^2 / E|g_large|^2
    assert math.sqrt(small_over_large) == pytest.approx(math.sqrt(gain))
    assert math.sqrt(gain) <= math.sqrt(ratio) * (1 + 1e-9)


def test_noise_moments_and_gain_equal_the_reference_on_parts():
    draw = torch.Generator().manual_seed(4)
    parts = [torch.full((300,), 0.1) + torch.randn(300, generator=draw) for _ in range(8)]
    small = sum(float((p.double() ** 2).sum()) for p in parts) / 8
    large = float((torch.stack([p.double() for p in parts]).mean(0) ** 2).sum())
    assert noise_gain(*noise_moments(small, large, 8), 8.0) == pytest.approx(gain_of_parts(parts, batch_ratio=8.0))


@given(
    st.builds(
        Served,
        version=st.integers(0, 2**40),
        delta=st.none() | POSITIVE,
        small_batch_size=st.none() | st.integers(1, 2**20),
        static_scale=st.none() | st.floats(1e-6, 1e3),
        s_min=st.none() | st.floats(1e-6, 1.0),
        s_max=st.none() | st.floats(1.0, 1e3),
    )
)
def test_served_numbers_are_the_same_after_a_round_trip_through_a_vector(served):
    assert Served.from_vector(served.to_vector()) == served


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "magic"),
        ("delta", 0.0),
        ("delta", "0.5"),
        ("static_scale", 1e30),
        ("s_max", 1e4),
        ("s_min", 0.0),
        ("small_batch_size", 0),
        ("version", -1),
    ],
)
def test_an_invalid_answer_of_the_service_is_refused_with_the_name_of_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        Served.from_answer({"version": 1, "policy": "ags", field: value}, "ags")


def test_to_host_records_its_event_on_the_device_of_the_vector(monkeypatch):
    """If a script does not set the current device, an event on the wrong device would be complete immediately."""

    class OnSecond:
        device, shape, dtype = torch.device("cuda", 1), (2,), torch.float64

    class Host:
        def copy_(self, vector, non_blocking):
            assert isinstance(vector, OnSecond)
            assert non_blocking

    class Event:
        stream = None

        def record(self, stream):
            self.stream = stream

    monkeypatch.setattr(torch, "empty", lambda *_args, **_named: Host())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    assert to_host(OnSecond()).event.stream == ("stream of", torch.device("cuda", 1))
