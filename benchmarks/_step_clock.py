"""Imported by a training script of `benchmarks.ease`: notes when each optimizer step of rank 0 ends.

It is a clock beside the agent's. Two runs of a script differ by what else the machine does; what the agent measured and
this clock, taken from the same steps, do not.
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

_ended_at_s: list[float] = []


def _stepped(*_: Any) -> None:
    if dist.get_rank() == 0:
        if not _ended_at_s:
            atexit.register(_write)
        _ended_at_s.append(time.perf_counter())


def _write() -> None:
    Path(os.environ["STEP_CLOCK_FILE"]).write_text(json.dumps(_ended_at_s))


def _scaled(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
    """A step that the scaler skips ends too; before the first that it does not skip, the agent counts none either."""
    before = len(_ended_at_s)
    result = _scaler_step(scaler, *args, **kwargs)
    if before and len(_ended_at_s) == before:
        _stepped()
    return result


register_optimizer_step_post_hook(_stepped)
_scaler_step = torch.amp.GradScaler.step
torch.amp.GradScaler.step = _scaled  # type: ignore[assignment, method-assign]
