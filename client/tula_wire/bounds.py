"""Physical bounds of numbers on the wire; both sides refuse a value outside them as a mistake or a lie."""

from __future__ import annotations

from typing import Final, Literal

MAX_COUNT: Final = 2**31 - 1
"""Nodes, ranks, steps between two refreshes, examples in a batch or a data set."""
MAX_NUMBER: Final = 2**53
"""Steps, sequence numbers and versions: the integers that a double represents exactly."""
MIN_FACTOR: Final = 1e-6
MAX_FACTOR: Final = 1e3
"""Factors of gradient scaling; a batch that is a million times larger needs sqrt(10**6)."""
MIN_DELTA: Final = 1e-12
MAX_DELTA: Final = 1e12
"""Gradient variability (equation 5) at which a step is sensitive."""
MAX_USD_PER_HOUR: Final = 1e6
MAX_BYTES_PER_S: Final = 1e14
"""Bytes per second that one rank can all-reduce: ten times the memory bandwidth of any device."""
MAX_DURATION_S: Final = 10 * 365 * 86_400.0
LAUNCH_TOKEN_S: Final = 2 * 86_400.0
"""Lifetime of the token that a launch gives its agents, which is extended when their run's lease is renewed."""
FURTHER_WARMUP_STEPS: Final = 3
"""Most steps discarded from a launch's second and later batches, when process, optimizer and links are already warm.

The first step compiles for the new shape, the second captures a CUDA graph, and the third is the first to replay it.
"""
MIN_EPOCHS: Final = 1e-9
MAX_EPOCHS: Final = 1e6

NOISE_WEIGHT: Final = 4.0
"""The constant c in the learning rate's factor (|G|^2 + c S/b) / (|G|^2 + c S/B), see docs/gradient-scaling.md."""

ScalingPolicy = Literal["gain", "ags", "static", "none", "measure"]
