"""Compute of a training step on one device from what is counted of network and device, before any run.

    t(b) = b (arithmetic 3 F / peak + activations A / W) + parameters P / W + floor

F are the FLOPs of one forward pass per sample, A the bytes that one sample leaves for the backward pass, P the bytes of
parameters, W the memory bandwidth. `python -m benchmarks._fit_roofline` fits the numbers below.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tula_service.perfmodel.points import column

_OF_ARITHMETIC, _OF_ACTIVATIONS, _OF_PARAMETERS = 0.634, 18.5, 30.7
"""From timm's table (Apache-2.0: 765 rows, one RTX 3090 with AMP) and the rows of Lambda's, TensorFlow's, DLPerf's and
mxnet-finetuner's (BSD-3-Clause, Apache-2.0: eleven devices), each network or device left out in turn when scored."""
_GUESS: Final = (4.15, 1.02, -0.61)
"""log(bytes kept / bytes per number) = g0 + g1 log F + g2 log parameters, over the networks of the same tables."""
FLOOR_S: Final = 0.03
"""Launches and the optimizer, for all accelerators: batch sweeps on one device in Pollux's and DLPerf's tables
(Apache-2.0) have floors of 7 to 215 ms, around 30. No table has small batches on another class of devices."""
KEPT_PER_OUTPUT: Final = 2.0
"""Numbers that autograd keeps for each output of a layer: a convolution's and its activation's."""
GUESSED_ACTIVATIONS_SD: Final = 0.3
_LOG_BYTES: Final = (0.0, 60.0 * math.log(2.0))


def guessed_activation_bytes(flops_per_sample: float, parameter_count: float, bytes_per_number: float) -> float:
    """Bytes that one sample leaves for the backward pass, where they were not counted; off by a factor of about two.

    Raises ObservationError unless the counts are positive: a third of a tiny number may be 0.
    """
    column("flops_per_sample", [flops_per_sample], above=0.0)
    of_flops, of_parameters = math.log(flops_per_sample), math.log(parameter_count)
    guess = _GUESS[0] + _GUESS[1] * of_flops + _GUESS[2] * of_parameters + math.log(bytes_per_number)
    return math.exp(min(max(guess, _LOG_BYTES[0]), _LOG_BYTES[1]))


def log_per_sample(flops_per_sample: float, peak_tflops: float, activation_bytes: float, gb_per_s: float) -> float:
    """Logarithm of the seconds that one sample adds to a step."""
    arithmetic = math.log(3.0 * _OF_ARITHMETIC) + math.log(flops_per_sample) - math.log(peak_tflops * 1e12)
    return float(np.logaddexp(arithmetic, math.log(_OF_ACTIVATIONS) + _log_seconds(activation_bytes, gb_per_s)))


def log_per_step(parameter_bytes: float, gb_per_s: float) -> float:
    """Logarithm of the seconds that a step takes at any batch."""
    return float(np.logaddexp(math.log(FLOOR_S), math.log(_OF_PARAMETERS) + _log_seconds(parameter_bytes, gb_per_s)))


def _log_seconds(amount: float, gb_per_s: float) -> float:
    return math.log(amount) - math.log(gb_per_s * 1e9)
