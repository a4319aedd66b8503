"""Tests that the contract refuses impossible numbers and texts with one sentence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import tula_wire as wire
from tula_wire.text import printable, printable_lines


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (wire.ScalingPatch, "static_scale", 1e24),
        (wire.ScalingPatch, "s_max", 1e38),
        (wire.ScalingPatch, "s_min", 1e-30),
        (wire.ScalingPatch, "delta", 1e24),
        (wire.ScalingPatch, "small_batch_size", 2**31),
        (wire.Price, "usd_per_node_hour", 1e308),
        (wire.Price, "usd_per_gb_hour", 1e7),
        (wire.SpotPrice, "restart_s", 1.7e308),
        (wire.SpotPrice, "checkpoint_interval_s", 1e12),
        (wire.Limits, "deadline_s", 1e12),
        (wire.TokenCreate, "expires_in_s", 1e12),
        (wire.JobSpec, "epochs", 5e-324),
    ],
)
def test_a_number_beyond_its_physical_bounds_is_refused(model: type[BaseModel], field: str, value: Any) -> None:
    """A `static_scale` of 1e24 once destroyed weights, and a stored price of 1e308 made pages fail."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate({field: value})
    assert {"greater_than_equal", "less_than_equal"} & {
        one["type"] for one in caught.value.errors() if one["loc"] == (field,)
    }


@pytest.mark.parametrize(
    "text", ["a\x00", "a\nb", "\x1b[31m", "a\x7f", "a\x9b1m", "\u202egnp", "\u2066a", "a\u200f", "\u2028"]
)
def test_a_name_with_a_character_that_is_not_printable_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        wire.ModelSpec(name=text)


def test_a_message_is_kept_on_one_printable_line() -> None:
    """A refusal would lose the cause of the run's end, since the message is often the text of an exception."""
    patch = wire.RunPatch(state="failed", message="RuntimeError: a\n\tb \x1b[31mred\x1b[0m \u202e")
    assert patch.message == "RuntimeError: a b \ufffd[31mred\ufffd[0m \ufffd"
    assert printable("é 日本 \U0001f600") == "é 日本 \U0001f600"


def test_an_output_keeps_its_lines_and_nothing_that_steers_a_terminal_or_reorders_text() -> None:
    written = "\x1b[1;31mloss\x1b[0m 1.5\r\n10%\r50%\r100%\nend\u202e\x00\ud800\tx"
    assert printable_lines(written) == "loss 1.5\n100%\nend\ufffd\ufffd\ufffd x"


@pytest.mark.parametrize("name", ["usd_per_kwh", "gco2_per_kwh", "usd_per_hour_of_waiting"])
@pytest.mark.parametrize("model", [wire.JobSpec, wire.JobPatch])
def test_a_price_in_quotes_is_refused(model: type[BaseModel], name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: "0.3"})
    assert (name,) in {one["loc"] for one in caught.value.errors()}
