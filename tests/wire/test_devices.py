"""Tests that accelerator names from drivers, clouds and tables lead to the right row of the device table."""

from __future__ import annotations

import pytest

from tula_wire.devices import DEVICES, capacities_gib, known_device


@pytest.mark.parametrize(
    ("name", "capacities", "memory_gb_per_s", "has_bf16"),
    [
        ("NVIDIA RTX 6000 Ada Generation", (48,), 960, True),
        ("Quadro RTX 6000", (24,), 672, False),
        ("NVIDIA GH200 480GB", (96, 144), 4000, True),
        ("NVIDIA H200", (141,), 4800, True),
        ("A100-80GB", (80,), 2039, True),
        ("A100-80", (80,), 2039, True),
        ("NVIDIA A100-SXM4-80GB", (80,), 2039, True),
        ("NVIDIA A100 80GB PCIe", (80,), 2039, True),
        ("NVIDIA A100-SXM4-40GB", (40,), 1555, True),
        ("TITAN-X-Maxwell-12GB", (12,), 336, False),
        ("NVIDIA A10G", (24,), 600, True),
        ("Tesla V100-SXM2-16GB", (16,), 900, False),
    ],
)
def test_a_name_means_the_device_that_is_called_so(name, capacities, memory_gb_per_s, has_bf16):
    found = known_device(name)
    assert found is not None
    device = DEVICES[found]
    assert capacities_gib(name, device) == capacities
    assert device.memory_gb_per_s == memory_gb_per_s
    assert (device.tflops["bf16"] is not None) == has_bf16


@pytest.mark.parametrize("name", [None, "RTX A4000", "A1000", "TPU v4"])
def test_another_device_whose_name_contains_a_known_one_is_not_known(name):
    assert known_device(name) is None
