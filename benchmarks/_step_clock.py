"""Records when each step of rank 0 ends; the training scripts of `benchmarks.ease` import this module.

This clock is independent of the agent. Other work on the machine makes two runs of a script differ, but the agent's
measurements and this clock cover the same steps of one run. If there are several optimizers (a GAN has two, and ZeRO
wraps one in another), a step ends when the last optimizer has taken its step.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

_ended_at_s: dict[int, list[float]] = {}  # by optimizer
_skipped: set[int] = set()  # indices in the scaled optimizer's list
_last = 0


def _stepped(optimizer: Any, *_: Any) -> None:
    global _last
    if dist.get_rank() == 0:
        if not _ended_at_s:
            atexit.register(_write)
        _last = id(optimizer)
        _ended_at_s.setdefault(_last, []).append(time.perf_counter())


def _write() -> None:
    ended = {"ended_at_s": _ended_at_s[_last], "skipped": sorted(_skipped)}
    Path(os.environ["STEP_CLOCK_FILE"]).write_text(json.dumps(ended))


def _scaled(scaler: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the end of a step that the scaler skips, except before the first real step; the agent does the same."""
    steps = len(_ended_at_s.get(id(optimizer), ()))
    result = _scaler_step(scaler, optimizer, *args, **kwargs)
    if steps and len(_ended_at_s[id(optimizer)]) == steps:
        _skipped.add(steps)
        _stepped(optimizer)
    return result


register_optimizer_step_post_hook(_stepped)
_scaler_step = torch.amp.GradScaler.step
torch.amp.GradScaler.step = _scaled  # type: ignore[assignment, method-assign]
