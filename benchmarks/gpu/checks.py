"""Part 1: what the agent relies on of a device."""

from __future__ import annotations

import time
from dataclasses import asdict

import torch

from benchmarks.gpu.device_checks import CHECKS, Device, check
from benchmarks.gpu.store import Results


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """A row for each check, with its verdicts."""
    del smoke  # sizes follow the device
    ends = time.monotonic() + seconds
    under_test = Device(device)
    for name in results.missing(list(CHECKS)):
        if time.monotonic() > ends:
            results.end_row(None)
            return
        results.add(name, {"verdicts": [asdict(verdict) for verdict in check(under_test, name)]})
