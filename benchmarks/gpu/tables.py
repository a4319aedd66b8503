"""Measures memory and the time of each phase of a step at growing batches until memory runs out; writes the tables."""

from __future__ import annotations

import contextlib
import csv
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.gpu.networks import Network, WithLoss, networks
from benchmarks.gpu.store import Results, Row
from tula_agent import estimate_memory
from tula_agent.measure.memory import MemoryMonitor, capacity_bytes
from tula_agent.oom_watch import is_out_of_memory

T = TypeVar("T")
PRECISIONS = {"bf16": "bf16", "tf32": "tf32", "fp32": "single", "fp16": "mixed"}
"""The value of each precision in the column `precision` of tests/data/single_device.csv."""
SMOKE_PRECISIONS = ("fp16",)
KEPT_BYTES = {"bf16": 4, "fp16": 4, "tf32": 8, "fp32": 8}
"""Bytes that autograd keeps for each output of a layer: two elements (`benchmarks.cold_start.KEPT_PER_OUTPUT`)."""
FITS_STEPS = 3
"""Steps after which a batch counts as fitting; the optimizer's state and the next batch exist after the first step."""
FIRST_BATCH, SMOKE_BATCHES, BISECTIONS, MEASURED_S = 8, 2, 4, 0.3
PHASES = ("forward_s", "backward_s", "optimizer_s")
STEP_COLUMNS = (
    "source", "gpu", "network", "precision", "local_batch_size", "step_time_s", "parameters", "flops_per_sample",
    "activation_elements_per_sample", "operations_per_step", "convolution_elements_per_sample",
    "transposed_elements_per_sample", "activation_checkpointing",
)  # fmt: skip
"""The columns of tests/data/single_device.csv and five others, for `python -m benchmarks.cold_start --steps FILE`."""
FACTS = (
    "parameters", "flops_per_sample", "operations_per_step", "convolution_elements_per_sample",
    "transposed_elements_per_sample",
)  # fmt: skip
MEMORY_COLUMNS = (
    "workload", "source", "gpu", "model", "precision", "local_batch_size", "memory_bytes", "analytic_bytes",
)  # fmt: skip
"""Columns of tests/data/grids/memory.csv, for `python -m benchmarks.memory --grids FILE`."""
GRID_COLUMNS = (
    "workload", "source", "gpu", "cluster", "model", "cnn", "grid", "num_nodes", "world_size", "local_batch_size",
    "global_batch_size", "step_time_s",
)  # fmt: skip
"""Columns of tests/data/grids/step_time.csv, for `python -m benchmarks.step_time --grids FILE`."""
ONE_DEVICE = {"cluster": "one device", "cnn": 1, "grid": "regular", "num_nodes": 1, "world_size": 1}


class Stopwatch:
    """Records points in time during a step; on CUDA it uses events, so that the host does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """End a phase and begin the next phase."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between consecutive marks, after waiting for the device."""
        if self._device.type != "cuda":
            return [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]
        torch.cuda.synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [before.elapsed_time(after) * 1e-3 for before, after in pairs]


@dataclass
class Trainer:
    """Trains one network in one precision on one device."""

    network: Network
    precision: str
    device: torch.device

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        with self.device:  # random weights are drawn faster on the device
            self.model: nn.Module = WithLoss(self.network.build())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        fp16 = self.precision == "fp16" and self.device.type == "cuda"  # on a CPU, bfloat16 is used instead
        self.scaler: Any = torch.cuda.amp.GradScaler() if fp16 else None
        self.dtype = torch.float16 if fp16 else torch.bfloat16

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return an autocast context for mixed precision, or a null context for other precisions."""
        if self.precision in ("fp32", "tf32"):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def step(
        self, batch: tuple[torch.Tensor, torch.Tensor], at_optimizer: Callable[[], None] | None = None
    ) -> Stopwatch:
        """Take one step; call `at_optimizer` before the optimizer's step, when all gradients exist."""
        watch = Stopwatch(self.device)
        watch.mark()
        self.optimizer.zero_grad()
        with self.autocast():
            loss = self.model(*batch)
        watch.mark()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        watch.mark()
        if at_optimizer is not None:
            at_optimizer()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        watch.mark()
        return watch

    def step_time_s(self, size: int, *, channels_last: bool, smoke: bool) -> float:
        """Return the median seconds of several steps with `size` examples, excluding the first step."""
        inputs, targets = self.network.batch(size, self.device)
        if channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = inputs.to(memory_format=torch.channels_last)
        times = [sum(self.step((inputs, targets)).seconds()) for _ in range(3 if smoke else 13)]
        return statistics.median(times[len(times) // 4 :])

    def attempt(self, work: Callable[[int], T], size: int) -> T | None:
        """Return the result of `work` for `size` examples, or None if it runs out of memory."""
        try:
            return work(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.optimizer.zero_grad()  # outside the handler, whose traceback keeps the activations
        free_memory(self.device)
        return None

    def fits(self, size: int) -> bool:
        """Return True if FITS_STEPS steps with `size` examples do not run out of memory."""

        def steps(size: int) -> bool:
            batch = self.network.batch(size, self.device)
            for _ in range(FITS_STEPS):
                self.step(batch).seconds()
            return True

        return self.attempt(steps, size) is not None

    def measure(self, size: int, monitor: MemoryMonitor, measured_s: float) -> Row:
        """Return the median time of each phase of a step, and the peak memory."""
        batch = self.network.batch(size, self.device)
        self.step(batch).seconds()  # chooses kernels and creates the optimizer's state
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        monitor.saw_batch(size, batch, None)
        self.step(batch, lambda: monitor.at_optimizer([self.model])).seconds()
        times: list[list[float]] = []
        ends = time.monotonic() + measured_s
        while len(times) < 3 or (len(times) < 20 and time.monotonic() < ends):
            times.append(self.step(batch).seconds())
        read = monitor.read([self.model], [self.optimizer])
        row = {name: statistics.median(column) for name, column in zip(PHASES, zip(*times, strict=True), strict=True)}
        row |= {
            "step_time_s": statistics.median(map(sum, times)),
            "steps": len(times),
            "peak_bytes": read["peak_bytes"],
        }
        row |= {"reserved_bytes": read.get("reserved_bytes"), "context_bytes": read.get("context_bytes")}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            row["driver_bytes"] = total - free
        return row


def free_memory(device: torch.device) -> None:
    """Collect garbage and empty the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_network(network: Network, precision: str, device: torch.device, ends: float, smoke: bool) -> Row:
    """Return all figures of one network in one precision; `complete` is False if the time limit `ends` was reached."""
    trainer, monitor = Trainer(network, precision, device), MemoryMonitor(1)
    monitor.before_training([trainer.model])
    with trainer.autocast():
        estimate = estimate_memory(trainer.model, network.batch(2, device), trainer.optimizer)
    capacity = capacity_bytes(device) or 0
    row: Row = {
        "parameters": estimate.parameters,
        "flops_per_sample": estimate.flops_per_sample / 3.0,  # of one forward pass, as in the table
        "operations_per_step": estimate.operations_per_step,
        "convolution_elements_per_sample": estimate.convolution_elements_per_sample,
        "transposed_elements_per_sample": estimate.transposed_elements_per_sample,
        "activation_checkpointing": estimate.activation_checkpointing,
        "capacity_bytes": capacity,
        "largest_from_estimate": estimate.largest_local_batch_size(capacity),
        "largest_from_two": None,
        "largest_measured": None,
        "fits_steps": FITS_STEPS,
        "complete": False,
        "batches": {},
    }
    size = 2 if smoke else FIRST_BATCH
    measure = partial(trainer.measure, monitor=monitor, measured_s=0.0 if smoke else MEASURED_S)
    while time.monotonic() < ends:
        read = trainer.attempt(measure, size)
        if read is None:
            del trainer, monitor, measure  # frees their blocks for the attempt with an empty allocator
            fits = partial(fits_afresh, network, precision, device)
            row["largest_measured"] = _bisect(fits, size // 2 if row["batches"] else 0, size, ends)
            row["complete"] = True
            break
        row["batches"][str(size)] = read | {"estimated_bytes": estimate.total_bytes(size)}
        if len(row["batches"]) == 2:
            row["largest_from_two"] = monitor.largest_local_batch_size()
        if smoke and len(row["batches"]) == SMOKE_BATCHES:
            row["complete"] = True  # never exhaust the memory of a host
            break
        size *= 2
    return row


def fits_afresh(network: Network, precision: str, device: torch.device, size: int) -> bool:
    """Return True if training with `size` examples can take three steps, beginning with an empty allocator."""
    free_memory(device)
    return Trainer(network, precision, device).fits(size)


def _bisect(fits: Callable[[int], bool], fitted: int, failed: int, ends: float) -> int:
    """Return the largest batch that fits between `fitted` (0: none did) and `failed`, to within 1/32 of `failed`."""
    for _ in range(BISECTIONS):
        middle = (fitted + failed) // 2
        if middle == fitted or time.monotonic() > ends:
            break
        fitted, failed = (middle, failed) if fits(middle) else (fitted, middle)
    return fitted


def run(results: Results, device: torch.device, seconds: float, smoke: bool) -> None:
    """Add a row for each precision and network, the most informative first."""
    ends = time.monotonic() + seconds
    found = networks(smoke)
    names = [f"{network} {precision}" for precision in (SMOKE_PRECISIONS if smoke else PRECISIONS) for network in found]
    for name in results.missing(names[: 2 if smoke else None], ends):
        network, precision = name.split()
        row = measure_network(found[network], precision, device, ends, smoke)
        free_memory(device)
        if not row["complete"] and not smoke:
            results.end_row(None)  # the next session measures the whole row again
            return
        results.add(name, row)


def write_tables(results: Results, folder: Path) -> None:
    """Write the tables that `benchmarks.cold_start`, `benchmarks.memory` and `benchmarks.step_time` read."""
    gpu = str(results.machine.get("device", "")).replace(",", " ")
    steps, memory, grid = [], [], []
    for name, row in results.rows.items():
        if not row.get("batches"):
            continue
        network, precision = name.split()
        about = {"source": "tula", "gpu": gpu, "precision": PRECISIONS[precision]}
        step = {"network": network} | {key: row.get(key) for key in FACTS}
        step["activation_checkpointing"] = int(row.get("activation_checkpointing", False))
        if len(row["batches"]) > 1:
            smallest, second = sorted(row["batches"], key=int)[:2]
            grows = row["batches"][second]["estimated_bytes"] - row["batches"][smallest]["estimated_bytes"]
            outputs = grows / (int(second) - int(smallest)) / KEPT_BYTES[precision]
            step["activation_elements_per_sample"] = round(outputs)
        for size, read in row["batches"].items():
            bytes_read = {"memory_bytes": read["peak_bytes"], "analytic_bytes": read["estimated_bytes"]}
            at = about | {"workload": name.replace(" ", "-"), "model": network, "local_batch_size": size}
            memory.append(at | bytes_read)
            steps.append(about | step | {"local_batch_size": size, "step_time_s": read["step_time_s"]})
            del at["precision"]
            grid.append(at | ONE_DEVICE | {"global_batch_size": size, "step_time_s": read["step_time_s"]})
    _write_csv(folder / "gpu_steps.csv", STEP_COLUMNS, steps)
    _write_csv(folder / "gpu_memory.csv", MEMORY_COLUMNS, memory)
    _write_csv(folder / "gpu_grid.csv", GRID_COLUMNS, grid)


def _write_csv(path: Path, columns: Iterable[str], rows: list[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
