"""Defines the policies of `TulaOptimizer`, and determines which values apply.

A value from the script takes precedence over a value that a user set on the service (`Served`), which takes precedence
over the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

import torch
from pydantic import ValidationError
from torch import nn

import tula_wire as wire
from tula_agent.scaling.direction import DAMPING
from tula_wire.bounds import MAX_DELTA, MAX_FACTOR, MIN_DELTA, MIN_FACTOR, NOISE_WEIGHT
from tula_wire.problems import remedy

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
"""Function that returns the mean loss of the unwrapped module on a batch, with autocast if training uses autocast."""

_DEFAULT_DELTA, _DEFAULT_S_MIN = 0.5, 1e-3  # from Algorithm 1


@dataclass(frozen=True)
class Gain:
    """Default policy: multiplies the learning rate by the noise gain of earlier steps or, under Adam, by its square
    root.

    Under torch's SGD, the updates of matrices also get directions that noise does not dominate (`direction`). The
    updates of embeddings and of parameter groups with `direction=False` keep their directions, and so do all updates
    of a network with batch normalization if B / b is at most 4; below 4, its factor also grows more slowly.

    s_max: the maximum factor; the default is B / b_small, which is also the upper limit.
    spike_limit: while the gain is above 1, gradients whose norm exceeds this multiple of the usual norm are clipped to
    this multiple; None turns clipping off.

    The class attributes are the rule's constants; only experiments change them, by subclassing. `noise_weight`: c in
    the formula of the gain (rule.py). `growth`: the maximum ratio between the factors of two consecutive steps; None
    means no limit. `adaptive_power`: the exponent of the gain under an optimizer that divides by the gradient's size.
    `damping`: c in the formula of the direction (direction.py); 0 gives all directions the same length, and None keeps
    the direction of the gradient. `measure_every`: the number of steps between measurements; None measures each of the
    first 512 steps, and then every eighth step. Raises ValueError if a number is out of range.
    """

    s_max: float | None = None
    spike_limit: float | None = 2.0

    name: ClassVar = "gain"
    noise_weight: ClassVar[float] = NOISE_WEIGHT
    growth: ClassVar[float | None] = 1.1
    adaptive_power: ClassVar[float] = 0.5
    damping: ClassVar[float | None] = DAMPING
    measure_every: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        _check("s_max", self.s_max, MIN_FACTOR, MAX_FACTOR)
        if self.spike_limit is not None and not self.spike_limit > 1.0:
            raise ValueError(f"spike_limit is {self.spike_limit}: use a number above 1, or None for no limit")


@dataclass(frozen=True)
class Measure(Gain):
    """Only measures the gradient noise scale, in each of the first 128 steps and then in every eighth step."""

    name: ClassVar = "measure"


@dataclass(frozen=True)
class Ags:
    """Algorithm 1 of the paper: a factor per element, computed once per epoch and applied to steps that are not
    sensitive.

    delta: a step is sensitive if its gradient variability (equation 5) is at least delta; 0.5 by default.
    s_min, s_max: bounds of every factor; 0.001 and sqrt(B / b_small) by default.
    steps_per_epoch: number of steps between two computations of the factors; by default, the factors are computed in
    the first step after a call of `TulaOptimizer.next_epoch`, which `run.steps` calls.
    model, loss: if both are given, a second backward pass on part of the batch computes the gradient at b_small
    (`loss(module, batch)` is the mean loss), and each batch must be passed to `TulaOptimizer.observe_batch`. Otherwise,
    the batches of single ranks and micro-steps are the small batches. Raises ValueError if a number is out of range.
    """

    delta: float | None = None
    s_min: float | None = None
    s_max: float | None = None
    steps_per_epoch: int | None = None
    model: nn.Module | None = None
    loss: LossFunction | None = None

    name: ClassVar = "ags"

    def __post_init__(self) -> None:
        _check("delta", self.delta, MIN_DELTA, MAX_DELTA)
        _check("s_min", self.s_min, MIN_FACTOR, MAX_FACTOR)
        _check("s_max", self.s_max, MIN_FACTOR, MAX_FACTOR)
        if self.s_max is not None and self.s_max < (self.s_min or _DEFAULT_S_MIN):
            raise ValueError(f"s_max is {self.s_max}, below s_min = {self.s_min or _DEFAULT_S_MIN}: use s_max >= s_min")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch is {self.steps_per_epoch}: use 1 or more")
        if (self.model is None) != (self.loss is None):
            raise ValueError("a probe needs both model and loss: pass both or neither")


@dataclass(frozen=True)
class Static:
    """Equation 8 of the paper: the same factor for every step that is not sensitive.

    scale: the factor; the default is the service's value, or 1 until the service has one. delta: as in `Ags`. Raises
    ValueError if a number is out of range.
    """

    scale: float | None = None
    delta: float | None = None

    name: ClassVar = "static"

    def __post_init__(self) -> None:
        _check("scale", self.scale, MIN_FACTOR, MAX_FACTOR)
        _check("delta", self.delta, MIN_DELTA, MAX_DELTA)


@dataclass(frozen=True)
class Off:
    """Policy that does nothing."""

    name: ClassVar = "none"


Policy: TypeAlias = Gain | Ags | Static | Off
POLICIES: Mapping[str, type[Policy]] = {kind.name: kind for kind in (Gain, Measure, Ags, Static, Off)}


def policy_named(policy: Policy | str) -> Policy:
    """Return `policy`, or the policy with this name and its defaults. Raises ValueError if the name is unknown."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: use one of {', '.join(POLICIES)}, or an object such as Gain(s_max=4)")
    return POLICIES[policy]()


@dataclass(frozen=True)
class Served:
    """Values that a user set on the service for the script's policy; `version` is 0 until they have been pulled."""

    version: int = 0
    delta: float | None = None
    small_batch_size: int | None = None
    static_scale: float | None = None
    s_min: float | None = None
    s_max: float | None = None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], policy: str) -> Served:
        """Parse the service's response, ignoring values for other policies and unknown fields.

        Raises a ValueError that names the field if a field has the wrong type or its value is out of range.
        """
        names = [field.name for field in fields(cls)]
        numbers = {name: answer[name] for name in (*names, "policy") if answer.get(name) is not None}
        try:
            read = wire.ScalingThresholds.model_validate(numbers, strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(f"{wrong['loc'][0]} = {wrong['input']!r:.40}: {remedy(wrong)}") from None
        if answer.get("policy") not in (None, policy):
            return cls(version=read.version)
        if read.s_min is not None and read.s_max is not None and read.s_max < read.s_min:
            raise ValueError(f"s_max = {read.s_max:g} is below s_min = {read.s_min:g}")
        served = cls(**{name: getattr(read, name) for name in names})
        # The first version has no values, so there is nothing to apply.
        return cls() if served == cls(version=1) else served

    def to_vector(self) -> list[float]:
        """Return the values as a vector for an exchange between ranks; None becomes NaN, and float64 stores all values
        exactly.
        """
        return [float("nan") if value is None else float(value) for value in vars(self).values()]

    @classmethod
    def from_vector(cls, numbers: Sequence[float]) -> Served:
        """Return the values in a vector that `to_vector` returned."""
        given = {field.name: x for field, x in zip(fields(cls), numbers, strict=True) if x == x}
        for name in ("version", "small_batch_size"):
            if name in given:
                given[name] = int(given[name])
        return cls(**given)  # type: ignore[arg-type]


SERVED_SLOTS = len(fields(Served))


@dataclass(frozen=True)
class Numbers:
    """Values that apply to a step; if `s_max` is None, the policy's default applies."""

    small_batch_size: int | None
    delta: float
    static_scale: float
    s_min: float
    s_max: float | None


def numbers_in_force(policy: Policy, small_batch_size: int | None, served: Served) -> Numbers:
    """Return the values that apply: for each one, the script's value, or else the service's, or else the default.

    A bound from the service that contradicts a bound in the script is ignored, since users of the service do not see
    the script.
    """

    def of_script(name: str) -> Any:
        return getattr(policy, name, None)

    def chosen(name: str, default: float) -> float:
        return next(x for x in (of_script(name), getattr(served, name, None), default) if x is not None)

    s_min = chosen("s_min", _DEFAULT_S_MIN)
    s_max = served.s_max if of_script("s_max") is None else of_script("s_max")
    if s_max is not None and s_max < s_min:
        s_min, s_max = of_script("s_min") or _DEFAULT_S_MIN, of_script("s_max")
    scale = of_script("scale")
    return Numbers(
        small_batch_size=served.small_batch_size if small_batch_size is None else small_batch_size,
        delta=chosen("delta", _DEFAULT_DELTA),
        static_scale=(served.static_scale or 1.0) if scale is None else scale,
        s_min=s_min,
        s_max=s_max,
    )


def _check(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise ValueError(f"{name} is {value}: use a number from {least:g} to {most:g}")
