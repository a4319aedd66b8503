"""Stores results in one JSON file per part, written after each row, so that a killed part loses only one row."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ROOT

Row = dict[str, Any]
H100 = ROOT / "benchmarks" / "results" / "gpu" / "nvidia-h100-80gb-hbm3"
"""The folder of the stored report of an H100."""


def now(device: torch.device) -> float:
    """Wait until `device` has finished its work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Results:
    """The rows of one part by name, stored in `FOLDER/PART.json`, and the machine on which they were measured.

    `under_way` is the name of a row that was begun but has no result, because its process ended or was killed. Raises
    ValueError if the file was written for another device.
    """

    def __init__(self, folder: Path, part: str, machine: Row | None = None) -> None:
        self.folder = folder
        self._path = folder / f"{part}.json"
        read: Row = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self.machine: Row = read.get("machine") or machine or {}
        self.rows: dict[str, Row] = read.get("rows", {})
        self.under_way: str | None = read.get("under_way")
        if machine and self.machine["device"] != machine["device"]:
            raise ValueError(
                f"{self._path.name} was measured on {self.machine['device']}, but this machine has "
                f"{machine['device']}: use another folder for --out"
            )

    def missing(self, names: Iterable[str], ends: float = math.inf) -> Iterator[str]:
        """Yield the names that have no row, in order, until `ends` (monotonic time); mark each name as under way."""
        for name in names:
            if time.monotonic() > ends:
                return
            if name not in self.rows:
                self.under_way = name
                self._write()
                yield name

    def add(self, name: str, row: Row) -> None:
        """Store a row under its name."""
        self.rows[name], self.under_way = row, None
        self._write()

    def end_row(self, why: str | None) -> None:
        """Close the row that was under way when its process ended; `why` is the failure, or None to repeat the row."""
        if self.under_way is not None and why is not None:
            self.rows[self.under_way] = {"failed": why}
        self.under_way = None
        self._write()

    def _write(self) -> None:
        data = {"machine": self.machine, "under_way": self.under_way, "rows": self.rows}
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._path)


def machine_of(device: torch.device) -> Row:
    """Return the names of this machine's device and driver, and its software versions."""
    found: Row = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    return found


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # NVML may be missing or may belong to another driver
        return f"unknown ({error})"
