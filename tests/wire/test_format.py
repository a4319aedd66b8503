"""Tests that numbers and configurations read as people write them, in the terminal and on pages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_wire import Configuration, format


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.138, "138 ms"),
        (4.2e-5, "42 us"),
        (59.4, "59.4 s"),
        (60, "1 min"),
        (3599.4, "59 min 59 s"),
        (3661, "1 h 1 min"),
        (90_000, "1 d 1 h"),
        (85_200, "23 h 40 min"),
        (1e9, "11,574 d 2 h"),
        (math.inf, "-"),
        (-0.2, "-200 ms"),
        (-0.0, "0 ms"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert format.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9996, "1 s"), (0.00099951, "1 ms"), (59.96, "1 min"), (59.6, "59.6 s"), (3599.7, "1 h"), (86_399, "1 d")],
)
def test_the_unit_of_a_duration_follows_from_what_is_printed(seconds: float, text: str) -> None:
    assert format.duration(seconds) == text


@given(st.floats(-1e12, 1e12))
def test_no_number_is_printed_with_an_exponent(number: float) -> None:
    assert "e" not in format.duration(number) + format.count(number) + format.money(number) + format.percent(number)


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_no_duration_says_sixty_of_a_lower_unit(seconds: float) -> None:
    text = format.duration(seconds).split()
    assert not (len(text) == 4 and (text[2], text[3]) in {("60", "s"), ("60", "min"), ("24", "h")})


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (None, "-"),
        (0.0, "$0.00"),
        (0.004, "$0.004"),
        (1e-7, "$0.0000001"),
        (0.9996, "$1.00"),
        (12.345, "$12.35"),
        (999.996, "$1,000"),
        (12345.6, "$12,346"),
        (-2.5, "-$2.50"),
    ],
)
def test_money_keeps_what_matters(usd: float | None, text: str) -> None:
    assert format.money(usd) == text


def test_sizes_counts_and_shares_have_units() -> None:
    assert [format.size(each) for each in (None, 512, 1.5 * 2**20, 2**45)] == ["-", "512 B", "1.5 MiB", "32.0 TiB"]
    assert [format.count(each) for each in (950, 32_800, 2.1e6)] == ["950", "32.8 k", "2.1 M"]
    assert [format.count(each) for each in (999.7, -2e6, math.nan, math.inf)] == ["1 k", "-2 M", "-", "-"]
    assert [format.size(each) for each in (1023.7, 1000)] == ["1 KiB", "1000 B"]
    energies = [format.energy(each) for each in (None, 0.95, 12.34, 1234.0)]
    assert energies == ["-", "950 Wh", "12.3 kWh", "1.23 MWh"]
    assert [format.mass(each) for each in (None, 492.3, 4920, 999_600)] == ["-", "492 g", "4.92 kg", "1 t"]
    assert format.percent(-0.0004, signed=True) == "+0.0 %"
    shares = format.percent(0.198), format.percent(0.05, signed=True), format.percent(0.5, digits=0)
    assert shares == ("19.8 %", "+5.0 %", "50 %")


def test_a_configuration_says_nodes_and_batches() -> None:
    assert format.configuration(Configuration(num_nodes=1, local_batch_size=32)) == "1 node, global batch 32 (local 32)"
    typed = Configuration(
        num_nodes=4, ranks_per_node=2, local_batch_size=8, grad_accum_steps=2, instance_type="g5.12xlarge"
    )
    assert format.configuration(typed) == "4 nodes of g5.12xlarge, global batch 128 (local 8 x 2 micro-steps)"


def test_a_configuration_says_the_values_of_its_options() -> None:
    options = (("checkpointing", "off"), ("compile", "on"), ("num_workers", "8"), ("precision", "bf16"), ("zero", "2"))
    chosen = Configuration(num_nodes=1, local_batch_size=32, options=options)
    said = "1 node, global batch 32 (local 32), no checkpointing, compiled, 8 workers, bf16, zero 2"
    assert format.configuration(chosen) == said
    assert [format.option("num_workers", "1"), format.option("compile", "default")] == ["1 worker", "compile default"]


@pytest.mark.parametrize(
    ("ratio", "text"), [(0.5, "0.5"), (0.882, "0.88"), (2.64, "2.6"), (9.96, "10"), (120.3, "120"), (1e5, "100,000")]
)
def test_a_multiple_is_written_without_exponent(ratio: float, text: str) -> None:
    assert format.multiple(ratio) == text
