"""Observes the settings that a script actually uses, regardless of its options: precision, compilation, checkpointing,
sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tula_agent.torch_private import autocast_dtype, compiled_frames, in_backward, is_compiled, is_sharded

_ON, _OFF = ("on", "true", "yes", "1"), ("off", "false", "no", "0", "none")
_HALVES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
_SINGLES = ("fp32", "float32", "tf32")
_SHARDED, _WHOLE = (*_ON, "fsdp", "fsdp2", "full_shard", "zero3"), (*_OFF, "ddp", "no_shard")


class SwitchWatch:
    """Observes the forward passes of one step with hooks, which `end` removes.

    The models themselves and modules without children get a hook, because autocast is often on only inside a model, and
    checkpointing repeats some forward passes during the backward pass. Once anything has been compiled, only models
    whose own call is not compiled get a hook, since any other hook would cause recompilation.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._types: set[torch.dtype | None] = set()
        self._repeats = False
        self._looks_inside = not compiled_frames()
        modules = dict.fromkeys(models)
        if self._looks_inside:
            modules |= dict.fromkeys(m for model in models for m in model.modules() if not any(m.children()))
        else:
            modules = {model: None for model in models if is_compiled(model) or is_compiled(_inner(model))}
        self._hooks = [module.register_forward_pre_hook(self._called) for module in modules]

    def _called(self, _module: torch.nn.Module, _inputs: Any) -> None:
        if in_backward():
            self._repeats = True
        else:
            self._types.add(autocast_dtype())

    def end(self) -> dict[str, Any]:
        """Remove the hooks; return the observed switches, keyed by field names of `tula_wire.HostFacts` (None:
        unknown).
        """
        for hook in self._hooks:
            hook.remove()
        parameters = [p for model in self._models for p in model.parameters()]
        weights = {p.dtype for p in parameters if p.is_floating_point()}
        used = {dtype for dtype in self._types if dtype is not None} or weights
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in used))
        return {
            "precision": names if self._types and weights else None,
            "compiled": self._compiled(),
            "checkpointing": self._repeats if self._looks_inside and self._types else None,
            "sharded": is_sharded(parameters, self._models) if parameters else None,
        }

    def _compiled(self) -> bool | None:
        """Return True if a model is compiled, None if only other code is compiled, or else False."""
        if not compiled_frames():
            return False
        return True if any(is_compiled(module) for model in self._models for module in model.modules()) else None


def contradictions(options: Mapping[str, str], seen: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each option that contradicts the observed step; `seen` contains the observed switches.

    Unknown options and unknown values are skipped, since only the script knows their meaning.
    """
    looks: dict[str, Callable[[str], str | None]] = {
        "precision": lambda word: _precision(word, seen.get("precision")),
        "compile": lambda word: _switch(
            word in _ON, word in _OFF, seen.get("compiled"), "a model is compiled", "nothing was compiled"
        ),
        "checkpointing": lambda word: _switch(
            word in _ON,
            word in _OFF,
            seen.get("checkpointing"),
            "parts of its forward pass were repeated in the backward pass",
            "no part of its forward pass was repeated in the backward pass",
        ),
        "num_workers": lambda word: _workers(word, seen.get("loader_workers")),
    }
    looks |= dict.fromkeys(
        ("fsdp", "sharding"),
        lambda word: _switch(
            word in _SHARDED,
            word in _WHOLE,
            seen.get("sharded"),
            "its parameters are sharded",
            "each rank has all parameters",
        ),
    )
    for name, look in looks.items():
        word = options.get(name, "").lower()
        if (what := look(word)) is not None:
            yield f"{name} is {word} in this run, but {what}: use {{{name}}} where the script sets this option"


def _precision(word: str, seen: str | None) -> str | None:
    """Return a sentence with the observed precision if it contradicts the requested one; None if either is unknown."""
    asked = next((name for part, name in _HALVES.items() if part in word), None)
    if seen is None or (asked is None and word not in _SINGLES):
        return None
    used = set(seen.split(", "))
    agrees = asked in used if asked is not None else not used & set(_HALVES.values())
    return None if agrees else f"its forward pass was computed in {seen}"


def _switch(asked_on: bool, asked_off: bool, seen: bool | None, on: str, off: str) -> str | None:
    """Return a switch's observed state in words if it is the opposite of the requested state, or else None."""
    if seen is None or not (asked_on or asked_off) or seen is asked_on:
        return None
    return on if seen else off


def _workers(word: str, num_workers: int | None) -> str | None:
    differs = word.isdecimal() and num_workers is not None and int(word) != num_workers
    return f"its loader has {num_workers}" if differs else None


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a DDP wrapper, or the model itself if it is not wrapped."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
