"""Memory of this rank by component (equation 3): static parts by counting, peaks from the allocator or the kernel.

What the driver knows beyond PyTorch's allocator comes from NVML (package nvidia-ml-py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tula_agent.batches import batch_bytes
from tula_agent.guard import logger
from tula_agent.torch_private import ddp_models, local_part, nvml_device_index
from tula_wire.memory import MemoryReading, largest_local_batch_size, static_bytes


def _size(tensor: torch.Tensor) -> int:
    """Bytes that this rank holds of `tensor`: with FSDP 2 and tensor parallelism, its shard."""
    local = local_part(tensor)
    return int(local.numel() * local.element_size())


def parameter_bytes(models: Iterable[torch.nn.Module]) -> int:
    """Bytes of parameters and buffers on this rank, each tensor once."""
    unique = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
    return sum(_size(tensor) for tensor in unique.values())


def gradient_bytes(models: Iterable[torch.nn.Module]) -> int:
    """Bytes of the gradients as they stand now; DDP's buckets, where they are a copy, count as activations."""
    unique = {id(p): p for model in models for p in model.parameters()}
    return sum(_size(p.grad) for p in unique.values() if p.grad is not None)


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of optimizer state: momentum, second moments, master weights."""
    total = 0
    for optimizer in optimizers:
        for state in list(optimizer.state.values()):
            if isinstance(state, dict):
                total += sum(_size(value) for value in state.values() if isinstance(value, torch.Tensor))
    return total


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of this process now, or its peak. Linux; elsewhere the peak stands for both.

    VmHWM rather than ru_maxrss: the latter is inherited across exec and may be the launcher's.
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
    """Bytes that this rank may use: the device's memory, or its share of the host's under the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits) // max(1, ranks_per_node)


def bucket_bytes(models: Iterable[torch.nn.Module]) -> int:
    """Bytes of DDP's buckets where they copy the gradients: allocated at every batch size, counted nowhere else."""
    return gradient_bytes([m for m in ddp_models(models) if not getattr(m, "gradient_as_bucket_view", False)])


def device_of(models: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter; without one, CUDA if the process has initialised it, else the CPU."""
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda" if cuda else "cpu")


def context_bytes(device: torch.device) -> int | None:
    """CUDA context and libraries: what this process holds beyond the allocator; None without NVML.

    In a container NVML may answer process ids of the host; a single process on the device is taken for this one.
    """
    try:
        nvml, handle = _open(device)
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        mine = [p for p in found if p.pid == os.getpid()] or (found if len(found) == 1 else [])
        held = int(mine[0].usedGpuMemory)
    except Exception:
        return None
    return max(0, held - int(torch.cuda.memory_reserved(device)))


def device_use(device: torch.device | None) -> dict[str, float]:
    """Telemetry of a CUDA device as `nvidia-smi` shows it; empty for another device or without NVML.

    `gpu_utilization` is the share of the last second, or less, in which a kernel ran (0 to 1), `gpu_memory_bytes` what
    all processes hold.
    """
    if device is None or device.type != "cuda":
        return {}
    try:
        nvml, handle = _open(device)
        busy_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return {"gpu_utilization": busy_percent / 100, "gpu_memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).used}
    except Exception:
        return {}


@cache
def _open(device: torch.device) -> tuple[Any, Any]:
    """The library and its handle of `device`: by UUID, since NVML numbers all devices of the machine and torch those in
    CUDA_VISIBLE_DEVICES. Raises ImportError or NVML's own errors."""
    import pynvml

    pynvml.nvmlInit()
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:  # torch before 2.4
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(nvml_device_index(device))
    name = str(uuid)
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name if name.startswith("GPU-") else f"GPU-{name}")


class MemoryMonitor:
    """Counts the components at the few moments when each can be distinguished, and predicts the largest local batch.

    None of the moments is per step: `before_training` once the model is built, `at_optimizer` while gradients exist,
    `read` when a report is due. What was counted is kept for a report at the end, when the script has freed its model.
    `largest_seen` is the largest batch so far: the peak belongs to it. `device` is known once memory was read.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self.largest_seen = 0
        self._ranks_per_node = ranks_per_node
        self._resident_before: int | None = None
        self._parameters: int | None = None
        self._gradients: int | None = None
        self._state: int | None = None
        self._batch: int | None = None
        self.device: torch.device | None = None
        self._buckets = 0
        self._growing: dict[int, float] = {}  # by local batch size, bytes beyond everything that is counted
        self._static = 0.0
        self._capacity = 0
        self._logged = False

    def before_training(self, models: list[torch.nn.Module], *, first: bool = True) -> None:
        """Count the parameters and, before the first forward pass of the process (`first`), what is resident."""
        if first:
            self._resident_before = resident_bytes()
        if models:
            self._parameters = parameter_bytes(models)

    def at_optimizer(self, models: list[torch.nn.Module]) -> None:
        """Count the gradients: they exist now, and may be set to None afterwards."""
        self._gradients = gradient_bytes(models)

    def saw_batch(self, size: int, batch: Any, loader: Any) -> None:
        """A batch of `size` examples, larger than all before it; counted with those that the loader prefetches."""
        self.largest_seen = size
        ahead = (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", None) or 0)
        self._batch = batch_bytes(batch) * (1 + int(ahead))

    def read(self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> MemoryReading:
        """Read what is allocated now and at its peak; some tens of microseconds."""
        if models or self.device is None:
            self.device = device_of(models)
            # On a host, buckets are resident before training begins, or never were touched.
            self._buckets = bucket_bytes(models) if self.device.type == "cuda" else 0
        if self._parameters is None and models:
            self._parameters = parameter_bytes(models)
        if optimizers:
            self._state = optimizer_bytes(optimizers)
        memory = self._breakdown(self.device)
        if self.largest_seen:
            self.observe(memory, self.largest_seen, self._buckets)
        return memory

    def reset_peak(self) -> None:
        """Forget the peak so far, and give cached memory back: a larger batch follows."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to what is resident now

    def _breakdown(self, device: torch.device) -> MemoryReading:
        """The components as known now; activations are the peak without everything static."""
        reserved: int | None = None
        rest: int | None
        counted = int(static_bytes(self._parameters, self._gradients, self._state)) + (self._batch or 0)
        if device.type == "cuda":
            peak, reserved = int(torch.cuda.max_memory_allocated(device)), int(torch.cuda.max_memory_reserved(device))
            context, rest = context_bytes(device), peak - counted
        else:
            peak, before = resident_bytes(peak=True), self._resident_before
            context = None if before is None else max(0, before - (self._parameters or 0))
            rest = None if context is None else peak - context - counted
        return MemoryReading(
            method="peak_rss" if reserved is None else "cuda_allocator",
            peak_bytes=peak,
            parameter_bytes=self._parameters,
            gradient_bytes=self._gradients,
            optimizer_bytes=self._state,
            activation_bytes=None if rest is None or self._parameters is None else max(0, rest),
            batch_bytes=self._batch,
            reserved_bytes=reserved,
            context_bytes=context,
            capacity_bytes=capacity_bytes(device, self._ranks_per_node),
        )

    def observe(self, memory: MemoryReading, local_batch_size: int, fixed_bytes: int = 0) -> None:
        """Keep the peak after steps with at most `local_batch_size` examples; ignored where a component is unknown.

        fixed_bytes: allocated at every batch size, but part of `activation_bytes`.
        """
        if memory.activation_bytes is None or memory.gradient_bytes is None or memory.capacity_bytes is None:
            return
        self._capacity = memory.capacity_bytes
        self._static = static_bytes(
            memory.parameter_bytes,
            memory.gradient_bytes,
            memory.optimizer_bytes,
            context_bytes=memory.context_bytes,
            fixed_bytes=fixed_bytes,
        )
        growing = memory.activation_bytes + (memory.batch_bytes or 0) - fixed_bytes
        self._growing[local_batch_size] = max(0, growing)

    def largest_local_batch_size(self) -> int | None:
        """The largest batch that should fit, at least the largest that did; None while too little is known."""
        answer = largest_local_batch_size(self._capacity, self._static, self._growing)
        if answer is not None and not self._logged:
            self._logged = True
            logger.info("batches of up to %d examples per rank should fit into memory", answer)
        return answer
