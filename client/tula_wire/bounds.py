"""Defines physical bounds of values in the API; a value outside its bounds is an error or a forgery and is rejected."""

from __future__ import annotations

from typing import Final, Literal

MAX_COUNT: Final = 2**31 - 1
"""The maximum number of nodes, of ranks, of steps between two refreshes, and of examples in a batch or a data set."""
MAX_NUMBER: Final = 2**53
"""The maximum step, sequence number and version, up to which a double represents every integer exactly."""
MIN_FACTOR: Final = 1e-6
MAX_FACTOR: Final = 1e3
"""The bounds of gradient-scaling factors; a batch that is 10**6 times the base batch needs a factor of sqrt(10**6)."""
MIN_DELTA: Final = 1e-12
MAX_DELTA: Final = 1e12
"""The bounds of the threshold of gradient variability (equation 5) at which a step counts as sensitive."""
MAX_USD_PER_HOUR: Final = 1e6
MAX_BYTES_PER_S: Final = 1e14
"""The maximum rate at which one rank can all-reduce bytes, ten times the memory bandwidth of any device."""
MAX_DURATION_S: Final = 10 * 365 * 86_400.0
LAUNCH_TOKEN_S: Final = 2 * 86_400.0
"""The lifetime of the token that a launch gives its agents; renewing the run's lease extends the lifetime."""
FURTHER_WARMUP_STEPS: Final = 3
"""The maximum number of warm-up steps that are discarded from a launch's second and later batches.

The process, the optimizer and the links are already warm by then.

The first step compiles for the new shape, the second captures a CUDA graph, and the third first replays it.
"""
MIN_EPOCHS: Final = 1e-9
MAX_EPOCHS: Final = 1e6

NOISE_WEIGHT: Final = 4.0
"""The constant c in the learning rate factor (|G|^2 + c S/b) / (|G|^2 + c S/B); see docs/gradient-scaling.md."""

ScalingPolicy = Literal["gain", "ags", "static", "none", "measure"]
