"""Creates gain policies with modified constants."""

from __future__ import annotations

from typing import Any

from tula_agent.scaling import Gain


def gain(*, spike_limit: float | None = 2.0, s_max: float | None = None, **constants: Any) -> Gain:
    """Return a gain policy with modified class constants, such as `noise_weight` or `growth`."""
    return type("Changed", (Gain,), constants)(s_max=s_max, spike_limit=spike_limit)
