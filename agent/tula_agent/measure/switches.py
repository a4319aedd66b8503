"""Whether a script does what its run's options say: autocast, compilation, checkpointing, workers of the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tula_agent.torch_private import autocast_dtype, compiled_frames, in_backward, is_compiled

_ON, _OFF = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
_HALVES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16}
_SINGLES = ("fp32", "float32", "tf32")


class SwitchWatch:
    """Looks at the forward passes of one step by hooks, which `end` removes. Only the script knows what other options
    mean.

    Modules without children get a hook, and the models themselves: autocast is often on within a model alone, and
    checkpointing repeats the forward passes of some of its parts in the backward pass. Once anything is compiled, only
    a model whose own call is not compiled gets one, since another hook would have it compiled again.
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

    def end(self, options: Mapping[str, str], num_workers: int | None) -> list[str]:
        """Remove the hooks, and return a sentence for each of `options` that the step did not do."""
        for hook in self._hooks:
            hook.remove()
        return list(self._contradictions(options, num_workers))

    def _contradictions(self, options: Mapping[str, str], num_workers: int | None) -> Iterator[str]:
        looks: dict[str, Callable[[str], str | None]] = {
            "precision": self._precision,
            "compile": self._compiled,
            "checkpointing": self._checkpointing,
            "num_workers": lambda word: _workers(word, num_workers),
        }
        for name, look in looks.items():
            word = options.get(name, "").lower()
            seen = look(word)
            if seen is not None:
                yield f"{name} is {word} in this run, but {seen}: pass {{{name}}} on to where the script sets it"

    def _precision(self, word: str) -> str | None:
        """Return what was seen instead of a precision; None where it agrees, and where either is unknown."""
        asked = next((dtype for part, dtype in _HALVES.items() if part in word), None)
        weights = {p.dtype for model in self._models for p in model.parameters() if p.is_floating_point()}
        used = {dtype for dtype in self._types if dtype is not None} or weights
        if not self._types or not weights or (asked is None and word not in _SINGLES):
            return None
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in used))
        halves = used & {torch.float16, torch.bfloat16}
        agrees = asked in used if asked is not None else not halves
        return None if agrees else f"its forward pass computed in {names}"

    def _compiled(self, word: str) -> str | None:
        if word in _ON and not compiled_frames():
            return "nothing was compiled"
        compiled = any(is_compiled(module) for model in self._models for module in model.modules())
        return "a model is compiled" if word in _OFF and compiled else None

    def _checkpointing(self, word: str) -> str | None:
        if not self._looks_inside or not self._types:
            return None
        if word in _ON and not self._repeats:
            return "no part of its forward pass was repeated in the backward pass"
        repeats = word in _OFF and self._repeats
        return "parts of its forward pass were repeated in the backward pass" if repeats else None


def _workers(word: str, num_workers: int | None) -> str | None:
    differs = word.isdecimal() and num_workers is not None and int(word) != num_workers
    return f"its loader has {num_workers}" if differs else None


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that DDP wraps, else the model itself."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
