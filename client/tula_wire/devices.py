"""Lists common accelerators with their peak speed at each precision, memory bandwidth and memory capacity.

All peaks are for dense matrices; half precision on tensor cores accumulates in single precision. The figures were
written down from memory, and each entry names the document to check before you rely on a figure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

PROCESSOR: Final = "CPU"


@dataclass(frozen=True)
class Device:
    """The peak speeds and memory of an accelerator, and the document that states these figures.

    The speeds `peak`, `fp32`, `tf32` and `fp16` are in TFLOP/s, and None if the device does not support the
    precision. `peak` applies to a job without a precision. bf16 is as fast as fp16 on devices that support tf32, and is
    not supported by other devices. The capacities are the memory sizes, in GiB, in which the device is sold.
    """

    peak: float
    fp32: float
    tf32: float | None
    fp16: float | None
    memory_gb_per_s: float
    capacities_gib: tuple[int, ...]
    source: str

    @property
    def tflops(self) -> dict[str, float | None]:
        """Return the peak at each precision in TFLOP/s, with None for each unsupported precision."""
        half = self.fp16 if self.tf32 is not None else None
        return {"fp32": self.fp32, "tf32": self.tf32, "bf16": half, "fp16": self.fp16}


DEVICES: Final = {
    "K80": Device(4.1, 4.1, None, None, 240, (12,), "NVIDIA Tesla K80 board specification, one of its two GPUs"),
    "TITANXMAXWELL": Device(6.7, 6.7, None, None, 336, (12,), "NVIDIA GeForce GTX Titan X specifications"),
    "1080": Device(8.9, 8.9, None, 8.9, 320, (8,), "NVIDIA GeForce GTX 1080 white paper; fp16 for storage only"),
    "1080TI": Device(11.3, 11.3, None, 11.3, 484, (11,), "NVIDIA GeForce GTX 1080 Ti; fp16 for storage only"),
    "P100": Device(9.3, 9.3, None, 18.7, 732, (12, 16), "NVIDIA Tesla P100 PCIe data sheet"),
    "V100": Device(15.7, 15.7, None, 125, 900, (16, 32), "NVIDIA V100 SXM2 data sheet"),
    "T4": Device(8.1, 8.1, None, 65, 320, (16,), "NVIDIA T4 data sheet"),
    "2080": Device(13.4, 13.4, None, 53.8, 616, (8, 11), "NVIDIA Turing white paper, RTX 2080 Ti"),
    "RTX6000": Device(16.3, 16.3, None, 130.5, 672, (24,), "NVIDIA Turing white paper, Quadro RTX 6000"),
    "RTX8000": Device(16.3, 16.3, None, 130.5, 672, (48,), "NVIDIA Turing white paper, Quadro RTX 8000"),
    "3090": Device(35.6, 35.6, 35.6, 71, 936, (24,), "NVIDIA GA102 white paper, RTX 3090"),
    "A10": Device(31.2, 31.2, 62.5, 125, 600, (24,), "NVIDIA A10 data sheet"),
    "A10G": Device(31.2, 35, 35, 70, 600, (24,), "NVIDIA A10G data sheet"),
    "A30": Device(82, 10.3, 82, 165, 933, (24,), "NVIDIA A30 data sheet"),
    "A40": Device(37.4, 37.4, 74.8, 149.7, 696, (48,), "NVIDIA A40 data sheet"),
    "A6000": Device(38.7, 38.7, 77.4, 154.8, 768, (48,), "NVIDIA GA102 white paper, RTX A6000"),
    "A100": Device(156, 19.5, 156, 312, 1555, (40, 80), "NVIDIA A100 data sheet, 40 GB"),
    "A10080": Device(156, 19.5, 156, 312, 2039, (80,), "NVIDIA A100 data sheet, 80 GB SXM"),
    "RTX6000ADA": Device(91.1, 91.1, 91.1, 182.1, 960, (48,), "NVIDIA Ada white paper, RTX 6000 Ada Generation"),
    "L4": Device(30.3, 30.3, 60, 121, 300, (24,), "NVIDIA L4 data sheet"),
    "L40": Device(90.5, 90.5, 90.5, 181, 864, (48,), "NVIDIA L40 data sheet"),
    "L40S": Device(183, 91.6, 183, 362, 864, (48,), "NVIDIA L40S data sheet"),
    "4090": Device(82.6, 82.6, 82.6, 165.2, 1008, (24,), "NVIDIA Ada white paper, RTX 4090"),
    "5090": Device(104.8, 104.8, 104.8, 209.5, 1792, (32,), "NVIDIA RTX Blackwell white paper, RTX 5090"),
    "H100": Device(495, 67, 494.7, 989.4, 3350, (80, 94), "NVIDIA H100 data sheet, SXM"),
    "GH200": Device(495, 67, 494.7, 989.4, 4000, (96, 144), "NVIDIA GH200 data sheet, 96 GB"),
    "H200": Device(495, 67, 494.7, 989.4, 4800, (141,), "NVIDIA H200 data sheet, SXM"),
    "B200": Device(1100, 75, 1100, 2250, 8000, (180, 192), "NVIDIA HGX B200 data sheet, one GPU"),
    "MI300X": Device(654, 163.4, 653.7, 1307.4, 5300, (192,), "AMD Instinct MI300X data sheet"),
    PROCESSOR: Device(0.06, 0.06, 0.06, 0.06, 28, (), "a guess of one rank's share of a server"),
}


def known_device(accelerator: str | None) -> str | None:
    """Return the name in `DEVICES` that matches `accelerator`, or None; if several names match, return the longest.

    For example, V100 matches v100-16GB, but A40 does not match A4000. Punctuation between letters and digits is
    ignored, and so is a form factor, such as SXM4 in A100-SXM4-80GB.
    """
    names = sorted(DEVICES, key=len, reverse=True) if accelerator is not None else []
    return next((name for name in names if re.search(_pattern(name), accelerator or "", re.IGNORECASE)), None)


def capacities_gib(accelerator: str, device: Device) -> tuple[int, ...]:
    """Return the capacity that a name such as `A100-80GB` contains, or else all capacities of `device`."""
    sizes = tuple(gib for gib in device.capacities_gib if re.search(rf"(?<!\d){gib} ?G", accelerator))
    return sizes or device.capacities_gib


def _pattern(name: str) -> str:
    return r"[ ()_-]*(?:SXM4?|PCIE)?[ ()_-]*".join(map(re.escape, name)) + r"(?!\d)"
