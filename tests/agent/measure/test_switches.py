"""Tests which switches of a script, such as autocast, the agent detects in a step, and when it warns about options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tula_agent.measure.switches import SwitchWatch, contradictions

OFF = {"precision": "fp32", "compile": "off", "checkpointing": "off", "num_workers": "0"}


class Network(nn.Module):
    """A network of two layers; the second can be checkpointed."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return checkpoint(self.second, hidden, use_reentrant=False) if self.checkpoints else self.second(hidden)


@pytest.fixture
def frames() -> Iterator[dict[str, int]]:
    """Yield torch.compile's counters of compiled frames, and clear them after the test."""
    import torch._dynamo.utils

    yield torch._dynamo.utils.counters["frames"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def seen(network: nn.Module, *, autocast: torch.dtype | None = None) -> dict[str, Any]:
    """Return the switches that were detected in one watched step."""
    watch = SwitchWatch([network])
    inputs = torch.randn(3, 4, dtype=next(network.parameters()).dtype)
    with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
        loss = network(inputs).float().sum()
    loss.backward()
    facts = watch.end()
    assert not any(module._forward_pre_hooks for module in network.modules())
    return facts


def said(network: nn.Module, options: dict[str, str], *, autocast: torch.dtype | None = None) -> list[str]:
    """Return the agent's warnings about `options` after one watched step."""
    return list(contradictions(options, seen(network, autocast=autocast) | {"loader_workers": 0}))


def sharded(network: Network) -> Network:
    """Mark one of the network's parameters as FSDP 1 marks a parameter of which each rank holds a part."""
    network.first.weight._fsdp_flattened = True  # type: ignore[attr-defined]
    return network


def test_what_a_step_does_is_reported_whatever_the_options_say() -> None:
    plain = {"precision": "float32", "compiled": False, "checkpointing": False, "sharded": False}
    assert seen(Network()) == plain
    assert seen(Network(checkpoints=True), autocast=torch.bfloat16) == plain | {
        "precision": "bfloat16",
        "checkpointing": True,
    }
    assert seen(sharded(Network().half())) == plain | {"precision": "float16", "sharded": True}
    nothing = SwitchWatch([]).end()
    assert nothing == {"precision": None, "compiled": False, "checkpointing": None, "sharded": None}
    assert list(contradictions(OFF | {"precision": "bf16", "fsdp": "on"}, nothing)) == []


def test_a_script_that_follows_its_options_is_left_in_peace() -> None:
    assert said(Network(), OFF) == []
    assert said(Network(checkpoints=True), OFF | {"checkpointing": "on"}) == []
    assert said(Network(), OFF | {"precision": "bf16-mixed"}, autocast=torch.bfloat16) == []
    assert said(Network().bfloat16(), {"precision": "bf16"}) == []
    assert said(sharded(Network()), {"sharding": "full_shard", "fsdp": "2"}) == []
    assert said(Network(), {"precision": "amp", "compile": "max-autotune", "sharding": "zero2"}) == []  # its own words


@pytest.mark.parametrize(
    ("network", "autocast", "options", "sentence"),
    [
        (
            Network(),
            None,
            {"precision": "bf16"},
            "precision is bf16 in this run, but its forward pass was computed in fl",
        ),
        (
            Network(),
            torch.bfloat16,
            {"precision": "fp32"},
            "but its forward pass was computed in bfloat16: use {precisio",
        ),
        (Network(), torch.bfloat16, {"precision": "fp16"}, "but its forward pass was computed in bfloat16"),
        (Network(), None, {"compile": "on"}, "compile is on in this run, but nothing was compiled: use {compile}"),
        (Network(), None, {"checkpointing": "on"}, "but no part of its forward pass was repeated in the backward"),
        (Network(checkpoints=True), None, {"checkpointing": "off"}, "but parts of its forward pass were repeated"),
        (Network(), None, {"num_workers": "4"}, "num_workers is 4 in this run, but its loader has 0"),
        (
            Network(),
            None,
            {"fsdp": "on"},
            "fsdp is on in this run, but each rank has all parameters: use {fsdp}",
        ),
        (sharded(Network()), None, {"sharding": "ddp"}, "sharding is ddp in this run, but its parameters are sharded"),
    ],
)
def test_an_option_that_a_script_does_not_follow_is_named_with_what_it_did(
    network: nn.Module, autocast: torch.dtype | None, options: dict[str, str], sentence: str
) -> None:
    (only,) = said(network, options, autocast=autocast)
    assert sentence in only


def test_a_compiled_model_is_seen_and_is_not_compiled_again_for_being_looked_at(frames: dict[str, int]) -> None:
    network = torch.compile(Network(), backend="eager")
    network(torch.randn(3, 4)).sum().backward()
    before = frames["total"]
    assert before > 0
    assert said(network, {"compile": "on", "precision": "fp32", "checkpointing": "on"}) == []
    assert ["a model is compiled" in one for one in said(network, {"compile": "off"})] == [True]
    assert ["computed in float32" in one for one in said(network, {"precision": "bf16"})] == [True]
    assert frames["total"] == before
