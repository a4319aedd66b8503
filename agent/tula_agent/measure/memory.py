"""Memory of this rank by component (equation 3): static parts by counting, peaks by asking allocator or kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tula_agent.torch_private import local_part, nvml_device_index

__all__ = [
    "Memory",
    "MemoryProbe",
    "capacity_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "parameter_bytes",
    "resident_bytes",
]


@dataclass(frozen=True)
class Memory:
    """Bytes by component; None where nothing is known. Field for field the wire's `MemoryBreakdown`."""

    method: Literal["cuda_allocator", "peak_rss"]
    peak_bytes: int
    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    activation_bytes: int | None = None
    batch_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    capacity_bytes: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """Without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _size(tensor: torch.Tensor) -> int:
    # FSDP2 and tensor parallelism hold a shard: count what this rank holds.
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
    """What this rank may use: the device's memory, or its share of the host's under the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # noqa: PERF203 - absent, or "max"
            continue
    return min(limits) // max(1, ranks_per_node)


def _context_bytes(device: torch.device) -> int | None:
    """CUDA context and libraries: what this process holds beyond the allocator; None without NVML.

    In a container NVML may tell process ids of outside; a process that is alone on the device is ours all the same.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = _nvml_device(pynvml, device)
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        mine = [p for p in found if p.pid == os.getpid()] or (found if len(found) == 1 else [])
        held = int(mine[0].usedGpuMemory)
    except Exception:
        return None
    return max(0, held - int(torch.cuda.memory_reserved(device)))


def _nvml_device(pynvml: Any, device: torch.device) -> Any:
    """NVML counts devices as the machine has them, torch as CUDA_VISIBLE_DEVICES leaves them: so, by name (UUID)."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:  # torch before 2.4
        index = nvml_device_index(device)
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    name = str(uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(name if name.startswith("GPU-") else f"GPU-{name}")


class MemoryProbe:
    """Reads memory at the few moments when its parts can be told apart. Nothing here runs per step.

    `before_training` once the model is built; `at_optimizer` while gradients exist; `breakdown` when a report is due.
    What was counted is remembered, for a report at the end, when the script has let its model go.
    """

    def __init__(self, ranks_per_node: int = 1) -> None:
        self._ranks_per_node = ranks_per_node
        self._resident_before: int | None = None
        self._parameters: int | None = None
        self._gradients: int | None = None
        self._state: int | None = None
        self._batch: int | None = None

    def before_training(self, models: list[torch.nn.Module]) -> None:
        """Note what is resident before the first forward."""
        self._resident_before = resident_bytes()
        self.before_more_training(models)

    def before_more_training(self, models: list[torch.nn.Module]) -> None:
        """Other models are trained now, in a process that has held activations before."""
        if models:
            self._parameters = parameter_bytes(models)

    def at_optimizer(self, models: list[torch.nn.Module]) -> None:
        """Gradients exist now; later they may be set to None."""
        self._gradients = gradient_bytes(models)

    def saw_batch(self, size_bytes: int, loader: Any) -> None:
        """Bytes of a batch and of those that the loader's workers hold ready."""
        workers = getattr(loader, "num_workers", 0) or 0
        ahead = workers * (getattr(loader, "prefetch_factor", None) or 0)
        self._batch = size_bytes * (1 + int(ahead))

    def breakdown(
        self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], device: torch.device
    ) -> Memory:
        """The components as known now; activations are the peak less everything static."""
        if self._parameters is None and models:
            self._parameters = parameter_bytes(models)
        if optimizers:
            self._state = optimizer_bytes(optimizers)
        parameters, state = self._parameters, self._state
        static = (parameters or 0) + (self._gradients or 0) + (state or 0)
        known = parameters is not None
        if device.type == "cuda":
            peak = int(torch.cuda.max_memory_allocated(device))
            return Memory(
                method="cuda_allocator",
                peak_bytes=peak,
                parameter_bytes=parameters,
                gradient_bytes=self._gradients,
                optimizer_bytes=state,
                activation_bytes=max(0, peak - static - (self._batch or 0)) if known else None,
                batch_bytes=self._batch,
                reserved_bytes=int(torch.cuda.max_memory_reserved(device)),
                context_bytes=_context_bytes(device),
                capacity_bytes=capacity_bytes(device),
            )
        peak = resident_bytes(peak=True)
        before = self._resident_before
        context = None if before is None else max(0, before - (parameters or 0))
        rest = None if context is None else max(0, peak - context - static - (self._batch or 0))
        return Memory(
            method="peak_rss",
            peak_bytes=peak,
            parameter_bytes=parameters,
            gradient_bytes=self._gradients,
            optimizer_bytes=state,
            activation_bytes=rest if known else None,
            batch_bytes=self._batch,
            context_bytes=context,
            capacity_bytes=capacity_bytes(device, self._ranks_per_node),
        )
