"""Measures step time and memory with all combinations of a script's switches, and compares them with predictions.

The switches are precision, compilation, memory layout and checkpointing of ResNet-50 and GPT-2 small, at two batches.
`predicted_s` is predicted from launches of the base and of each switch alone, by adding the logarithms of the switches'
effects.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import get_context
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks.gpu.networks import Network, WithLoss, networks
from benchmarks.gpu.store import Results, Row
from benchmarks.gpu.tables import Trainer, free_memory

SIZES = {"resnet50": (64, 512), "gpt2": (8, 32)}
"""Batches by network; compiled networks run only at the first batch, for which several processes compile at once."""
SWITCHES = {
    "resnet50": {"precision": ("tf32", "bf16"), "layout": ("first", "last"), "checkpointing": ("off", "on")},
    "gpt2": {"precision": ("tf32", "bf16"), "checkpointing": ("off", "on")},
}
COMPILE = ("off", "on")
"""The values of the switch for compilation; compiling takes most of a minute, so compiled combinations come last."""
COMPILERS = 8
"""Number of processes that fill the compiler's cache before any compiled network is timed."""


class InSegments(nn.Module):
    """A network that recomputes its layers in the backward pass, in four segments."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for module in network.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False  # would overwrite the input from which a segment is recomputed

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        layers = list(self.network.children())
        features: Any = checkpoint_sequential(layers[:-1], 4, images, use_reentrant=False)
        output: torch.Tensor = layers[-1](features.flatten(1))
        return output


def _in_segments(build: Callable[[], nn.Module]) -> nn.Module:
    return InSegments(build())


def trainer_of(name: str, words: dict[str, str], device: torch.device, smoke: bool) -> Trainer:
    """Return a trainer of the network `name` whose switches have the values in `words`."""
    checkpointed = words["checkpointing"] == "on"
    network = networks(smoke)[f"{name}+checkpointing" if checkpointed and name == "gpt2" else name]
    if checkpointed and name == "resnet50":
        network = Network(partial(_in_segments, network.build), network.batch)
    trainer = Trainer(network, "fp32" if smoke else words["precision"], device)
    if words["compile"] == "on" and isinstance(trainer.model, WithLoss):
        trainer.model.network.compile()
    return trainer


def measure(name: str, words: dict[str, str], device: torch.device, smoke: bool) -> Row:
    """Return the median seconds of a step and the peak bytes, by batch, with the switches set as in `words`."""
    trainer = trainer_of(name, words, device, smoke)
    row: Row = {}
    for size in (2,) if smoke else SIZES[name][: 1 if words["compile"] == "on" else None]:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        began = time.monotonic()
        step_s = trainer.step_time_s(size, channels_last=words.get("layout") == "last", smoke=smoke)
        row[str(size)] = {"step_time_s": step_s, "took_s": time.monotonic() - began}
        if device.type == "cuda":
            row[str(size)]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        free_memory(device)
    return {"words": words, "batches": row}


def fill_cache(device: torch.device, smoke: bool) -> None:
    """Compile all combinations in concurrent processes, so that their kernels are in the compiler's cache."""
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, combinations(COMPILE[1:]), itertools.repeat(device), itertools.repeat(smoke)))


def _compile(combination: tuple[str, dict[str, str]], device: torch.device, smoke: bool) -> None:
    name, words = combination
    size, last = 2 if smoke else SIZES[name][0], words.get("layout") == "last"
    trainer_of(name, words, device, smoke).step_time_s(size, channels_last=last, smoke=True)


def combinations(compiled: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Return each network with each combination of values of its switches, the most informative first."""
    return [
        (name, dict(zip(SWITCHES[name], values, strict=True)) | {"compile": word})
        for word, name in itertools.product(compiled, SWITCHES)
        for values in itertools.product(*SWITCHES[name].values())
    ]


def predictions(rows: dict[str, Row]) -> dict[str, dict[str, float]]:
    """Return step times in seconds by row and batch, predicted from the base and from each switch alone."""
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
    """Add a row for each network and combination; compiled combinations come last."""
    ends = time.monotonic() + seconds
    rows = {
        f"{name} {' '.join(f'{switch}={word}' for switch, word in words.items())}": (name, words)
        for name, words in combinations(COMPILE[: 1 if smoke else None])
    }
    for label in results.missing(rows, ends):
        results.add(label, measure(*rows[label], device, smoke))
