"""Measures this rank's memory by component (equation 3).

Static components are counted from tensors; peaks are read from PyTorch's allocator or from the operating system.

Memory outside PyTorch's allocator is read through NVML (in the package nvidia-ml-py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tula_agent.allocations import segments_grow
from tula_agent.batches import batch_bytes
from tula_agent.guard import logger
from tula_agent.torch_private import ddp_models, local_part
from tula_wire.memory import (
    ALLOCATOR_VARIABLES,
    GROWING_SEGMENTS,
    RESERVED_RATIO,
    largest_local_batch_size,
    static_bytes,
)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total size of distinct tensors in bytes; count only this rank's part of sharded tensors."""
    parts = [local_part(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def _parameter_bytes(models: Iterable[torch.nn.Module]) -> int:
    return held_bytes(tensor for model in models for tensor in (*model.parameters(), *model.buffers()))


def _gradient_bytes(models: Iterable[torch.nn.Module]) -> int:
    """Return the bytes of the existing gradients; DDP's copies in buckets count as activations."""
    return held_bytes(p.grad for model in models for p in model.parameters() if p.grad is not None)


def _optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of momentum, second moments and master weights."""
    states = [state for optimizer in optimizers for state in list(optimizer.state.values()) if isinstance(state, dict)]
    return held_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))


def resident_bytes(peak: bool = False) -> int:
    """Return the current or peak resident memory of this process in bytes; on systems other than Linux, always the
    peak.

    The peak is VmHWM rather than ru_maxrss, since ru_maxrss is inherited across exec and may be the launcher's peak.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:" if peak else "VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def capacity_bytes(device: torch.device, ranks_per_node: int = 1) -> int | None:
    """Return the bytes that this rank may use: the device's memory, or this rank's share of the host's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits) // max(1, ranks_per_node)


def find_device(models: Iterable[torch.nn.Module]) -> torch.device:
    """Return the first parameter's device; without parameters, CUDA if it is initialised, or else the CPU."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda" if cuda else "cpu")


def context_bytes(device: torch.device) -> int | None:
    """Return the bytes that the CUDA context and libraries use outside the allocator, or None without NVML.

    In a container, NVML may report the host's process ids. If only one process uses the device, the function assumes
    that it is the current process.
    """
    try:
        nvml, handle = _open(device)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        mine = [p for p in processes if p.pid == os.getpid()] or (processes if len(processes) == 1 else [])
        held = int(mine[0].usedGpuMemory)
    except Exception:
        return None
    return max(0, held - int(torch.cuda.memory_reserved(device)))


def device_use(device: torch.device | None) -> dict[str, float]:
    """Return the usage of a CUDA device as `nvidia-smi` reports it; empty for other devices or without NVML.

    `gpu_utilization` is the fraction of the last second (or of a shorter period) in which a kernel ran, from 0 to 1;
    `gpu_memory_bytes` is the memory in use by all processes.
    """
    if device is None or device.type != "cuda":
        return {}
    try:
        nvml, handle = _open(device)
        busy_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return {"gpu_utilization": busy_percent / 100, "gpu_memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).used}
    except Exception:
        return {}


def total_energy_j(device: torch.device | None) -> float | None:
    """Return the energy in joules that a CUDA device has consumed since its driver was loaded.

    Returns None for other devices or without NVML. The counter includes all processes on the device.
    """
    if device is None or device.type != "cuda":
        return None
    try:
        nvml, handle = _open(device)
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3
    except Exception:  # devices before Volta have no such counter
        return None


@cache
def _open(device: torch.device) -> tuple[Any, Any]:
    """Return the NVML library and its handle for `device`. Raises ImportError or NVML's own errors.

    The device is found by UUID, since NVML numbers all devices of the machine, but torch numbers only the devices in
    CUDA_VISIBLE_DEVICES.
    """
    import pynvml

    pynvml.nvmlInit()
    name = str(torch.cuda.get_device_properties(device).uuid)
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name if name.startswith("GPU-") else f"GPU-{name}")


def allocator_reading(statistics: Mapping[str, Any], retries_before: int = 0) -> dict[str, int]:
    """Return the peaks and retries from `torch.cuda.memory_stats`, keyed by the field names of `MemoryBreakdown`.

    The first `retries_before` retries are not counted. A retry is an allocation request that was made while the device
    was full.
    """
    return {
        "peak_bytes": int(statistics.get("allocated_bytes.all.peak", 0)),
        "reserved_bytes": int(statistics.get("reserved_bytes.all.peak", 0)),
        "alloc_retries": int(statistics.get("num_alloc_retries", 0)) - retries_before,
    }


class MemoryMonitor:
    """Counts each memory component when it can be told apart from the others; predicts the largest local batch size.

    No method runs at every step: `before_training` is called once the model has been built, `at_optimizer` while
    gradients exist, and `read` when a report is due. The counts are kept for a final report, since the script may have
    freed its model by then. `largest_seen` is the largest batch size so far, which caused the peak. `device` is set
    once memory has been read.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self.largest_seen = 0
        self.device: torch.device | None = None
        self._ranks_per_node = ranks_per_node
        self._resident_before: int | None = None
        self._counted: dict[str, int] = {}  # parameters, gradients, optimizer state and batch, once known
        self._buckets = 0
        self._growing: dict[int, float] = {}  # by local batch size, the bytes that are in no counted component
        self._static = 0.0
        self._capacity = 0
        self._reserved_ratio = 1.0
        self._logged = False
        self._retries_before = 0
        self._retries_reported = False

    def before_training(self, models: list[torch.nn.Module], *, first: bool = True) -> None:
        """Count the parameters and, if this is before the first forward pass (`first`), read the resident memory."""
        if first:
            self._resident_before = resident_bytes()
        if models:
            self._counted["parameter_bytes"] = _parameter_bytes(models)

    def at_optimizer(self, models: list[torch.nn.Module]) -> None:
        """Count the gradients now, since they may be set to None afterwards."""
        self._counted["gradient_bytes"] = _gradient_bytes(models)

    def saw_batch(self, size: int, batch: Any, loader: Any) -> None:
        """Record a batch of `size` examples, the largest so far; count its bytes and those of prefetched batches."""
        self.largest_seen = size
        ahead = (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", None) or 0)
        self._counted["batch_bytes"] = batch_bytes(batch) * (1 + int(ahead))

    def read(self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return the memory in use and its peak as fields of `MemoryBreakdown`; this takes tens of microseconds."""
        if models or self.device is None:
            self.device = find_device(models)
            # Only these models copy gradients to buckets, which no other component includes. On a host, the buckets are
            # already resident before training begins, or are never touched.
            copies = [model for model in ddp_models(models) if not getattr(model, "gradient_as_bucket_view", False)]
            self._buckets = _gradient_bytes(copies) if self.device.type == "cuda" else 0
        if optimizers:
            self._counted["optimizer_bytes"] = _optimizer_bytes(optimizers)
        memory = self._components(self.device)
        if self.largest_seen:
            self.observe(memory, self.largest_seen, self._buckets)
        self.report_retries(memory)
        return memory

    def report_retries(self, memory: Mapping[str, Any]) -> None:
        """Warn once if a batch fits only because the allocator returned cached memory; `memory` is the result of
        `read`.
        """
        retries = memory.get("alloc_retries") or 0
        if retries and not self._retries_reported:
            self._retries_reported = True
            logger.warning(
                "the device was full %d times at a local batch size of %d, and a step had to wait until cached memory "
                "was returned to the device: use a smaller batch%s",
                retries,
                self.largest_seen,
                "" if segments_grow() else f", or set {ALLOCATOR_VARIABLES[0]}={GROWING_SEGMENTS}",
            )

    def reset_peak(self) -> None:
        """Reset the peak and return cached memory to the device before measuring a larger batch size."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.empty_cache()  # noqa: TID251 (a run that only measures, between two of its batches)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._retries_before = allocator_reading(torch.cuda.memory_stats(self.device))["alloc_retries"]
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the current resident memory

    def _components(self, device: torch.device) -> dict[str, Any]:
        """Return the components that are known so far; activation memory is the peak minus all static components."""
        parts: dict[str, Any] = {
            "method": "cuda_allocator",
            "capacity_bytes": capacity_bytes(device, self._ranks_per_node),
        }
        outside: int | None = 0
        if device.type == "cuda":
            parts |= allocator_reading(torch.cuda.memory_stats(device), self._retries_before)
            parts |= {"context_bytes": context_bytes(device), "growing_segments": segments_grow()}
        else:
            parts["method"], parts["peak_bytes"] = "peak_rss", resident_bytes(peak=True)
            if self._resident_before is not None:
                parts["context_bytes"] = max(0, self._resident_before - self._counted.get("parameter_bytes", 0))
            outside = parts.get("context_bytes")
        if outside is not None and "parameter_bytes" in self._counted:
            parts["activation_bytes"] = max(0, parts["peak_bytes"] - outside - sum(self._counted.values()))
        return {name: value for name, value in (parts | self._counted).items() if value is not None}

    def observe(self, memory: Mapping[str, Any], local_batch_size: int, fixed_bytes: int = 0) -> None:
        """Store the batch-dependent part of the peak memory of steps with up to `local_batch_size` examples.

        If a component is unknown, nothing is stored. memory: the result of `read`. fixed_bytes: the part of
        `activation_bytes` that is independent of the batch size.
        """
        if not {"activation_bytes", "gradient_bytes", "capacity_bytes"} <= memory.keys():
            return
        self._capacity = memory["capacity_bytes"]
        fragments = "reserved_bytes" in memory and not memory.get("growing_segments")
        self._reserved_ratio = RESERVED_RATIO if fragments else 1.0
        self._static = static_bytes(
            *(memory.get(f"{part}_bytes") for part in ("parameter", "gradient", "optimizer")),
            context_bytes=memory.get("context_bytes"),
            fixed_bytes=fixed_bytes,
        )
        growing = memory["activation_bytes"] + memory.get("batch_bytes", 0) - fixed_bytes
        self._growing[local_batch_size] = max(0, growing)

    def largest_local_batch_size(self) -> int | None:
        """Return the largest batch size expected to fit, which is at least the largest used so far; None if it cannot
        be predicted.
        """
        answer = largest_local_batch_size(self._capacity, self._static, self._growing, self._reserved_ratio)
        if answer is not None and not self._logged:
            self._logged = True
            logger.info("batch sizes of up to %d examples per rank should fit into memory", answer)
        return answer
