"""When memory is read in a run, and where what it says goes."""

from __future__ import annotations

from typing import Any

import torch

from tula_agent.guard import Guard
from tula_agent.measure.headroom import Headroom, bucket_bytes
from tula_agent.measure.memory import MemoryProbe
from tula_agent.measure.step_timer import batch_bytes
from tula_agent.ship.reporter import Reporter

__all__ = ["MemoryReports", "device_of"]


def device_of(models: list[torch.nn.Module]) -> torch.device:
    """Where the first parameter lives or, without one, the device that the process has turned to."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda" if cuda else "cpu")


class MemoryReports:
    """Memory by component goes with the next samples; the batch that would still fit is a column of its own."""

    def __init__(self, guard: Guard, reporter: Reporter, ranks_per_node: int) -> None:
        self.probe = MemoryProbe(ranks_per_node)
        self.headroom = Headroom()
        self._guard = guard
        self._reporter = reporter
        self.largest_seen = 0
        self._device: torch.device | None = None
        self._buckets = 0

    @property
    def read_once(self) -> bool:
        """True once memory was read."""
        return self._device is not None

    def saw_batch(self, size: int, batch: Any, loader: Any) -> None:
        """A batch of `size` examples, larger than all before it: `largest_seen`."""
        self.largest_seen = size
        self.probe.saw_batch(batch_bytes(batch), loader)

    def read(self, step: int, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Read what is held now, and what was at most; some tens of microseconds. Never raises."""
        if not self._guard.works("memory"):
            return
        with self._guard("memory"):
            if models or self._device is None:
                self._device = device_of(models)
                # On a host, buckets are resident before training begins, or never were touched.
                self._buckets = bucket_bytes(models) if self._device.type == "cuda" else 0
            device = self._device
            memory = self.probe.breakdown(models, optimizers, device)
            self._reporter.memory = memory.to_wire()
            if self.largest_seen:
                self.headroom.observe(memory, self.largest_seen, self._buckets)
            largest = self.headroom.largest_local_batch_size()
            if largest is not None:
                self._reporter.rows.add_value(step, "largest_local_batch_size", float(largest))
