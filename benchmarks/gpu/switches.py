"""Measures what the switches of a script do to time and memory, in all combinations, against the sum of single effects.

The switches are precision, compilation, memory layout and checkpointing of ResNet-50 and GPT-2 small, at two batches.
`predicted_s` is what a base and one launch for each switch would predict: the logarithms of the single effects add up.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.gpu.networks import Network, WithLoss, networks
from benchmarks.gpu.store import Results, Row
from benchmarks.gpu.tables import Trainer, free_memory

SIZES = {"resnet50": (64, 512), "gpt2": (8, 32)}
SWITCHES = {
    "resnet50": {"precision": ("tf32", "bf16"), "layout": ("first", "last"), "checkpointing": ("off", "on")},
    "gpt2": {"precision": ("tf32", "bf16"), "checkpointing": ("off", "on")},
}
COMPILE = ("off", "on")
"""Compiling takes most of a minute: its combinations come after all others."""


class InSegments(nn.Module):
    """A network whose layers are computed again in the backward pass, in four segments."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        layers = list(self.network.children())
        features: Any = checkpoint_sequential(layers[:-1], 4, images, use_reentrant=False)
        output: torch.Tensor = layers[-1](features.flatten(1))
        return output


def _in_segments(build: Callable[[], nn.Module]) -> nn.Module:
    return InSegments(build())


def measure(name: str, words: dict[str, str], device: torch.device, smoke: bool) -> Row:
    """Return the median seconds of a step and the peak bytes by batch, where the switches have the values `words`."""
    checkpointed = words["checkpointing"] == "on"
    network = networks(smoke)[f"{name}+checkpointing" if checkpointed and name == "gpt2" else name]
    if checkpointed and name == "resnet50":
        network = Network(partial(_in_segments, network.build), network.batch)
    trainer = Trainer(network, "fp32" if smoke else words["precision"], device)
    if words["compile"] == "on" and isinstance(trainer.model, WithLoss):
        trainer.model.network.compile()
    row: Row = {}
    for size in (2,) if smoke else SIZES[name]:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step_s = trainer.step_time_s(size, channels_last=words.get("layout") == "last", smoke=smoke)
        row[str(size)] = {"step_time_s": step_s}
        if device.type == "cuda":
            row[str(size)]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        free_memory(device)
    return {"words": words, "batches": row}


def predictions(rows: dict[str, Row]) -> dict[str, dict[str, float]]:
    """Return, by row and batch, the step time in seconds that the network's base and single switches predict."""
    found: dict[str, dict[str, float]] = {}
    for label, row in rows.items():
        if "failed" in row:
            continue
        network = label.split()[0]
        of_network = [other for name, other in rows.items() if name.split()[0] == network and "failed" not in other]
        base = _base(network)
        changed = [switch for switch, word in row["words"].items() if word != base[switch]]
        steps = {_key(other["words"]): other["batches"] for other in of_network}
        singles = [_key(base | {switch: row["words"][switch]}) for switch in changed]
        if not all(key in steps for key in [_key(base), *singles]):
            continue
        for size in row["batches"]:
            start = steps[_key(base)][size]["step_time_s"]
            log = sum(math.log(steps[key][size]["step_time_s"] / start) for key in singles)
            found.setdefault(label, {})[size] = start * math.exp(log)
    return found


def _base(network: str) -> dict[str, str]:
    return {switch: values[0] for switch, values in SWITCHES[network].items()} | {"compile": COMPILE[0]}


def _key(words: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(words.items()))


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add a row for each network and combination; combinations that compile come last."""
    ends = time.monotonic() + seconds
    rows: dict[str, tuple[str, dict[str, str]]] = {}
    for compiled, name in itertools.product(COMPILE[: 1 if smoke else None], SWITCHES):
        for values in itertools.product(*SWITCHES[name].values()):
            words = dict(zip(SWITCHES[name], values, strict=True)) | {"compile": compiled}
            rows[f"{name} {' '.join(f'{switch}={word}' for switch, word in words.items())}"] = (name, words)
    for label in results.missing(rows, ends):
        results.add(label, measure(*rows[label], device, smoke))
