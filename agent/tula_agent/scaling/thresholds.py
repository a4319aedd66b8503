"""The thresholds that steer gradient scaling: one frozen value, checked once, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

__all__ = ["Granularity", "PolicyName", "ScalingThresholds"]

PolicyName = Literal["gain", "ags", "static", "none"]
Granularity = Literal["tensor", "channel", "element"]

_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
_GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
_NOTHING = -1.0  # stands for None on the wire between ranks: no number here is negative


@dataclass(frozen=True)
class ScalingThresholds:
    """How gradients are scaled.

    `delta`: a step whose gradient variability (equation 5) reaches it is sensitive and is not scaled.
    `small_batch_size` b_small in examples; None: the batch of one rank or micro-step.
    `static_scale`: the factor of equation 8. `s_min`, `s_max`: bounds of every factor; `s_max` None: sqrt(B / b_small)
    for `ags` (Algorithm 1), B / b_small for `gain`. `refresh_steps`: optimizer steps between two factors of `ags`;
    None: once an epoch. `restore_step`: the service took settings back, and asks for the weights of a checkpoint at or
    before this step (`run.roll_back`).

    Raises ValueError naming the field when a value makes no sense.
    """

    version: int = 0
    policy: PolicyName = "gain"
    granularity: Granularity = "tensor"
    delta: float = 0.5
    small_batch_size: int | None = None
    static_scale: float = 1.0
    s_min: float = 1e-3
    s_max: float | None = None
    refresh_steps: int | None = None
    restore_step: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise ValueError(f"policy is {self.policy!r}: choose one of {', '.join(_POLICIES)}")
        if self.granularity not in _GRANULARITIES:
            raise ValueError(f"granularity is {self.granularity!r}: choose one of {', '.join(_GRANULARITIES)}")
        for name in ("delta", "static_scale", "s_min"):
            _require_positive(name, getattr(self, name))
        for name in ("small_batch_size", "s_max", "refresh_steps"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.s_max is not None and self.s_max < self.s_min:
            raise ValueError(f"s_max is {self.s_max}, below s_min = {self.s_min}: give s_max >= s_min")
        if self.restore_step is not None and self.restore_step < 0:
            raise ValueError(f"restore_step is {self.restore_step}: give a step, 0 or more")

    def served(self, said: Mapping[str, Any]) -> ScalingThresholds:
        """These, as the script made them, with what the service said; its nulls and unknown fields change nothing."""
        known = {field.name for field in fields(self)}
        return replace(self, **{name: value for name, value in said.items() if name in known and value is not None})

    def to_vector(self) -> list[float]:
        """Numbers only, for a reduction over ranks; every slot is exact in float64."""
        slots: list[float] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "policy":
                value = _POLICIES.index(value)
            elif field.name == "granularity":
                value = _GRANULARITIES.index(value)
            slots.append(_NOTHING if value is None else float(value))
        return slots

    @classmethod
    def from_vector(cls, slots: Sequence[float]) -> ScalingThresholds:
        """Inverse of `to_vector`; the vector of an older checkpoint is shorter by what was not there yet."""
        missing = [_NOTHING] * (VECTOR_LENGTH - len(slots))
        version, policy, granularity, delta, small, static, s_min, s_max, refresh, restore = [*slots, *missing]
        return cls(
            version=int(version),
            policy=_POLICIES[int(policy)],
            granularity=_GRANULARITIES[int(granularity)],
            delta=delta,
            small_batch_size=None if small == _NOTHING else int(small),
            static_scale=static,
            s_min=s_min,
            s_max=None if s_max == _NOTHING else s_max,
            refresh_steps=None if refresh == _NOTHING else int(refresh),
            restore_step=None if restore == _NOTHING else int(restore),
        )


VECTOR_LENGTH = len(fields(ScalingThresholds))


def _require_positive(name: str, value: float) -> None:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}: give a finite number above 0")
