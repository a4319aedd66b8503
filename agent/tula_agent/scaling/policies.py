"""Defines the policies of `TulaOptimizer`, and which of their numbers are in force.

A number from the script takes precedence, then a number that a user set at the service (`Served`), then the default.
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
"""Function that returns the mean loss of the bare module on a batch, under autocast if training uses it."""

_DEFAULT_DELTA, _DEFAULT_S_MIN = 0.5, 1e-3  # of Algorithm 1


@dataclass(frozen=True)
class Gain:
    """The default: multiplies the learning rate by the noise gain of earlier steps; under Adam, by its square root.

    Under torch's SGD the steps of matrices also turn to directions that noise does not dominate (`direction`).
    Embeddings keep their steps, and so does a parameter group with `direction=False`.

    s_max: the largest factor; the default is B / b_small, which is also the upper limit.
    spike_limit: while the gain is above 1, gradients longer than this multiple of the usual length are clipped to it;
    None turns clipping off.

    The class attributes are the rule's constants, which only experiments change, in a subclass. `noise_weight`: c of
    the gain. `growth`: the largest ratio between the factors of two consecutive steps; None means no limit.
    `adaptive_power`: the exponent of the gain under an optimizer that divides by the gradient's size. `damping`: c of
    the direction; 0 levels all directions, None leaves each step along the gradient. `measure_every`: steps between
    measurements; None measures each of the first 512 steps, then one in eight. Raises ValueError for a number out of
    range.
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
            raise ValueError(f"spike_limit is {self.spike_limit}: give a number above 1, or None for no limit")


@dataclass(frozen=True)
class Measure(Gain):
    """Only measures the gradient noise scale, at each of the first 128 steps and every eighth step after them."""

    name: ClassVar = "measure"


@dataclass(frozen=True)
class Ags:
    """Algorithm 1 of the paper: a factor per element, computed once per epoch and applied to steps that are not
    sensitive.

    delta: a step is sensitive if its gradient variability (equation 5) is at least delta; 0.5 by default.
    s_min, s_max: bounds of every factor; 0.001 and sqrt(B / b_small) by default.
    steps_per_epoch: number of steps between two computations of the factors; by default, they are computed after the
    first step that follows a call of `TulaOptimizer.next_epoch`, which `run.steps` makes.
    model, loss: if given, a second backward pass on part of the batch gives the gradient at b_small
    (`loss(module, batch)` is the mean loss); `TulaOptimizer.observe_batch` must then get each batch. Without them,
    ranks and micro-steps serve as small batches. Raises ValueError for a number out of range.
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
            raise ValueError(
                f"s_max is {self.s_max}, below s_min = {self.s_min or _DEFAULT_S_MIN}: give s_max >= s_min"
            )
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch is {self.steps_per_epoch}: give 1 or more")
        if (self.model is None) != (self.loss is None):
            raise ValueError("a probe needs both model and loss: give both, or neither")


@dataclass(frozen=True)
class Static:
    """Equation 8 of the paper: the same factor for every step that is not sensitive.

    scale: the factor; by default the service's, or 1 until the service has one. delta: as in `Ags`.
    Raises ValueError for a number out of range.
    """

    scale: float | None = None
    delta: float | None = None

    name: ClassVar = "static"

    def __post_init__(self) -> None:
        _check("scale", self.scale, MIN_FACTOR, MAX_FACTOR)
        _check("delta", self.delta, MIN_DELTA, MAX_DELTA)


@dataclass(frozen=True)
class Off:
    """Does nothing."""

    name: ClassVar = "none"


Policy: TypeAlias = Gain | Ags | Static | Off
POLICIES: Mapping[str, type[Policy]] = {kind.name: kind for kind in (Gain, Measure, Ags, Static, Off)}


def policy_named(policy: Policy | str) -> Policy:
    """Return the given policy, or the policy of this name with its defaults. Raises ValueError for an unknown name."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: give one of {', '.join(POLICIES)}, or an object such as Gain(s_max=4)")
    return POLICIES[policy]()


@dataclass(frozen=True)
class Served:
    """Numbers that a user set at the service for the script's policy; `version` is 0 until they have been pulled."""

    version: int = 0
    delta: float | None = None
    small_batch_size: int | None = None
    static_scale: float | None = None
    s_min: float | None = None
    s_max: float | None = None

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any], policy: str) -> Served:
        """Parse the service's answer, ignoring numbers of other policies and unknown fields.

        Raises ValueError that names a field with a wrong type or a value out of range.
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
        # The first version has no numbers, so there is nothing to apply.
        return cls() if served == cls(version=1) else served

    def to_vector(self) -> list[float]:
        """Return the numbers as a vector to exchange over ranks with a measurement: NaN for None, exact in float64."""
        return [float("nan") if value is None else float(value) for value in vars(self).values()]

    @classmethod
    def from_vector(cls, numbers: Sequence[float]) -> Served:
        """Return the numbers in a vector from `to_vector`."""
        given = {field.name: x for field, x in zip(fields(cls), numbers, strict=True) if x == x}
        for name in ("version", "small_batch_size"):
            if name in given:
                given[name] = int(given[name])
        return cls(**given)  # type: ignore[arg-type]


SERVED_SLOTS = len(fields(Served))


@dataclass(frozen=True)
class Numbers:
    """The numbers in force. If `s_max` is None, the policy's default applies."""

    small_batch_size: int | None
    delta: float
    static_scale: float
    s_min: float
    s_max: float | None


def numbers_in_force(policy: Policy, small_batch_size: int | None, served: Served) -> Numbers:
    """Return each number from the script, else from the service, else the default.

    A bound from the service that contradicts a bound of the script is ignored, since users set bounds without seeing
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
        raise ValueError(f"{name} is {value}: give a number from {least:g} to {most:g}")
