"""What vendors' data sheets say of accelerators, by the part of their name that tells them apart."""

from __future__ import annotations

import re

import tula_wire as wire
from tula_service.perfmodel.priors import Hardware

__all__ = ["KNOWN_DEVICES", "described_alike", "device_of", "hardware_of"]

_DEVICES: dict[str, tuple[float, float]] = {
    "K80": (4.1, 240.0), "P100": (9.3, 732.0), "V100": (15.7, 900.0), "T4": (8.1, 320.0), "1080TI": (11.3, 484.0),
    "TITANX(MAXWELL)": (6.7, 336.0), "2080": (13.4, 616.0), "RTX6000": (16.3, 672.0), "RTX8000": (16.3, 672.0),
    "3090": (35.6, 936.0), "A10": (31.2, 600.0), "A40": (37.4, 696.0), "A6000": (38.7, 768.0), "L4": (30.3, 300.0),
    "L40": (90.5, 864.0), "4090": (82.6, 1008.0), "A100": (156.0, 1555.0), "H100": (495.0, 3350.0),
    "H200": (495.0, 4800.0), "B200": (1100.0, 8000.0), "MI300X": (654.0, 5300.0), "A30": (82.0, 933.0),
    "L40S": (183.0, 864.0), "5090": (104.8, 1792.0), "1080": (8.9, 320.0), "CPU": (0.06, 28.0),
}  # fmt: skip
"""Dense peak in teraflop/s (fp32 up to Turing, TF32 tensor cores after it) and memory bandwidth in gigabyte/s."""

KNOWN_DEVICES = tuple(sorted(_DEVICES))

_PROCESSOR, _PROCESSOR_SD = "CPU", 1.0


def hardware_of(cluster: wire.ClusterSpec) -> Hardware:
    """The figures of an instance type; None where the specification and the data sheets leave them open."""
    name = _known(cluster.accelerator)
    if name is None:
        return Hardware(inter_node_gbps=cluster.network_gbps)
    peak, memory = _DEVICES[name]
    # A rank's share of a processor may be one core or forty, of which the specification says nothing.
    uncertain = _PROCESSOR_SD if name == _PROCESSOR else 0.0
    return Hardware(peak, cluster.network_gbps, memory_gb_per_s=memory, figures_sd=uncertain)


def described_alike(one: wire.ClusterSpec, other: wire.ClusterSpec) -> bool:
    """Whether two jobs name the same hardware; where neither gives it a name, what they do say of it must agree."""
    if (one.instance_type, one.accelerator, one.network_gbps) != (
        other.instance_type,
        other.accelerator,
        other.network_gbps,
    ):
        return False
    if one.accelerator is not None or one.instance_type != wire.DEFAULT_INSTANCE_TYPE:
        return True
    return (one.ranks_per_node, one.memory_bytes_per_rank) == (other.ranks_per_node, other.memory_bytes_per_rank)


def device_of(cluster: wire.ClusterSpec) -> str:
    """What is the same for clusters whose ranks run on the same device: V100-16GB and Tesla V100 are one, processors of
    two instance types are two."""
    name = _known(cluster.accelerator)
    if cluster.accelerator is None or name == _PROCESSOR:
        return f"{name or 'device'} of {cluster.instance_type}"
    return name or _spelt(cluster.accelerator)


def _known(accelerator: str | None) -> str | None:
    """The device of the data sheets that an accelerator is; V100 is in v100-16GB, A40 is not in A4000."""
    names = sorted(_DEVICES, key=len, reverse=True) if accelerator is not None else []
    return next((name for name in names if re.search(_pattern(name), accelerator or "", re.IGNORECASE)), None)


def _pattern(name: str) -> str:
    return "[ -]*".join(map(re.escape, name)) + r"(?!\d)"


def _spelt(accelerator: str) -> str:
    return accelerator.upper().replace(" ", "").replace("-", "")
