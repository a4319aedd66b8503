"""What a specification says of its accelerator that the accelerator cannot be."""

from __future__ import annotations

import tula_wire as wire
from tula_wire.devices import DEVICES, capacities_gib, known_device


def contradiction(model: wire.ModelSpec, cluster: wire.ClusterSpec) -> tuple[str, str] | None:
    """(field of the specification, sentence) of a precision or capacity that the accelerator does not have."""
    name = known_device(cluster.accelerator)
    if name is None:
        return None
    device = DEVICES[name]
    if model.precision is not None and device.tflops(model.precision) is None:
        has = ", ".join(each for each in ("fp32", "tf32", "bf16", "fp16") if device.tflops(each) is not None)
        return "model.precision", (
            f"{cluster.accelerator} does not compute in {model.precision}: give one of {has}, or correct "
            "cluster.accelerator."
        )
    given = cluster.memory_bytes_per_rank or 0
    most = max(capacities_gib(cluster.accelerator or "", device), default=None)
    if most is not None and given > most * 2**30:
        return "cluster.memory_bytes_per_rank", (
            f"memory_bytes_per_rank is {given / 2**30:.3g} GiB, and {cluster.accelerator} has at most {most} GiB: "
            "give what one device has, or correct cluster.accelerator."
        )
    return None
