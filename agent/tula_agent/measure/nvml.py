"""What the driver says of this rank's GPU through NVML (package nvidia-ml-py), beyond what PyTorch's allocator sees."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from tula_agent.torch_private import nvml_device_index


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
