"""The thresholds of gradient scaling: their values, how the service changes them, and how all ranks switch at one step.

The first rank pulls them with their ETag (`ThresholdPoller`). A reduction at a fixed cadence carries them to all ranks
(`SyncedThresholds`). What the training script passed explicitly, the service never changes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from pydantic import ValidationError

import tula_wire as wire
from tula_agent.guard import logger
from tula_agent.scaling.ranks import Arrival, Ranks
from tula_wire.bounds import Granularity, ScalingPolicy
from tula_wire.problems import remedy

if TYPE_CHECKING:
    from tula_agent.ship.transport import Transport

PolicyName = ScalingPolicy

AGREE_EVERY = 16
"""Steps between two chances to change thresholds."""
POLL_EVERY_S = 10.0

_CHOICES: dict[str, tuple[str, ...]] = {"policy": get_args(PolicyName), "granularity": ("element", "tensor")}
"""Stand in a vector by their place here, which is part of the format of a checkpoint."""
_NONE = -1.0
"""Stands for None in a vector: no number in it is negative."""


@dataclass(frozen=True)
class ScalingThresholds:
    """How gradients are scaled.

    `granularity`: of `ags`, a factor per element (Algorithm 1) or per tensor (a ratio of norms).
    `delta`: a step whose gradient variability (equation 5) reaches it is sensitive and is not scaled.
    `small_batch_size`: b_small in examples; None: the batch of one rank or micro-step.
    `static_scale`: the factor of equation 8, which `static` needs. `s_min`, `s_max`: bounds of every factor; `s_max`
    None: sqrt(B / b_small) for `ags` (Algorithm 1), B / b_small for `gain`. `refresh_steps`: optimizer steps between
    two factors of `ags`; None: once an epoch.

    Raises ValueError naming the field when a value makes no sense.
    """

    version: int = 0
    policy: PolicyName = "gain"
    granularity: Granularity = "element"
    delta: float = 0.5
    small_batch_size: int | None = None
    static_scale: float | None = None
    s_min: float = 1e-3
    s_max: float | None = None
    refresh_steps: int | None = None

    def __post_init__(self) -> None:
        _checked(vars(self))
        if self.policy == "static" and self.static_scale is None:
            raise ValueError("static_scale is missing: policy 'static' needs the factor of equation 8")
        if self.s_max is not None and self.s_max < self.s_min:
            raise ValueError(f"s_max is {self.s_max}, below s_min = {self.s_min}: give s_max >= s_min")

    def updated(
        self, answer: Mapping[str, Any], *, scripted: Collection[str], warn: Callable[[str], None]
    ) -> ScalingThresholds:
        """These with the values in the service's `answer`, except those named by `scripted`.

        A served bound that crosses a scripted one is left out too, with a call of `warn`: the service sets bounds
        without the script's. An answer for another policy than the scripted one changes the version only. Raises
        ValueError naming a field of a wrong type or out of its range. Fields of a newer service are ignored.
        """
        served = _checked(answer, strict=True)
        if "policy" in scripted and served.get("policy", self.policy) != self.policy:
            return replace(self, version=served.get("version", self.version))
        values = {name: value for name, value in served.items() if name not in scripted}
        s_min, s_max = values.get("s_min", self.s_min), values.get("s_max", self.s_max)
        if s_max is not None and s_max < s_min and ("s_min" in scripted or "s_max" in scripted):
            warn(f"the service's bound is ignored: with the script's, s_min = {s_min:g} is above s_max = {s_max:g}")
            values = {name: value for name, value in values.items() if name not in ("s_min", "s_max")}
        return replace(self, **values)

    def to_vector(self) -> list[float]:
        """Numbers only, for a reduction over ranks; every slot is exact in float64."""
        numbers = vars(self) | {name: choices.index(getattr(self, name)) for name, choices in _CHOICES.items()}
        return [_NONE if value is None else float(value) for value in numbers.values()]

    @classmethod
    def from_vector(cls, slots: Sequence[float]) -> ScalingThresholds:
        """Inverse of `to_vector`. Raises LookupError, ValueError or OverflowError for other numbers."""
        values: dict[str, Any] = {n: slot for n, slot in zip(_NAMES, slots, strict=False) if slot != _NONE}
        values |= {name: dict(enumerate(choices))[values[name]] for name, choices in _CHOICES.items()}
        return cls(**_checked(values))


_NAMES = [field.name for field in fields(ScalingThresholds)]


def _checked(values: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """The thresholds among `values` in the wire's types, without those that are null or absent.

    Raises ValueError naming one that is out of its range or, where `strict`, of another type.
    """
    known = {name: values[name] for name in _NAMES if values.get(name) is not None}
    try:
        found = wire.ScalingThresholds.model_validate(known, strict=strict)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"{wrong['loc'][0]} = {wrong['input']!r:.40}: {remedy(wrong)}") from None
    return found.model_dump(exclude_unset=True)


class SyncedThresholds:
    """Lets all ranks switch to the first rank's thresholds at the same step.

    Every rank calls `poll` once a step, in the same order. The first step starts a sum over ranks and waits for it.
    Every AGREE_EVERY-th starts one that the next step reads, so that no other step waits. Proposals of other ranks than
    the first are ignored.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._proposed: ScalingThresholds | None = None
        self._arrival: Arrival | None = None

    def propose(self, thresholds: ScalingThresholds) -> None:
        """Ask for `thresholds`; safe from another thread (assigns one reference)."""
        self._proposed = thresholds

    def poll(self, step: int, in_force: ScalingThresholds, device: torch.device) -> ScalingThresholds | None:
        """The thresholds that all ranks switch to at this step, if any; None on all of them if they make no sense."""
        if step % AGREE_EVERY == 0:
            proposed, self._proposed = self._proposed, None
            if step == 0:
                proposed = proposed or in_force
            self._arrival = self._ranks.send(self._vector(proposed, device))
            if step > 0:
                return None
        if self._arrival is None:
            return None
        values, self._arrival = self._arrival.values(), None
        try:
            return ScalingThresholds.from_vector(values[1:]) if values[0] > 0.5 else None
        except (LookupError, ValueError, OverflowError) as error:
            logger.warning("new thresholds of gradient scaling are ignored: %s", error)
            return None

    def _vector(self, thresholds: ScalingThresholds | None, device: torch.device) -> torch.Tensor:
        slots = [0.0] * (1 + len(_NAMES))
        if thresholds is not None and self._ranks.is_first:
            slots = [1.0, *thresholds.to_vector()]
        vector = torch.tensor(slots, dtype=torch.float64)
        if self._ranks.size == 1:
            return vector  # no reduction, so the device need not be waited for
        if device.type == "cuda":
            vector = vector.pin_memory()  # or the copy would wait for all queued work of the device
        return vector.to(device, non_blocking=True)

    def state(self) -> list[float] | None:
        """For a checkpoint: a proposal in flight; waits for its sum."""
        return None if self._arrival is None else self._arrival.values()

    def load(self, values: list[float] | None) -> None:
        """Inverse of `state`."""
        self._arrival = None if values is None else Arrival(torch.tensor(values, dtype=torch.float64))


class ThresholdPoller:
    """Pulls a job's thresholds on the shipping thread of the first rank; an unchanged answer costs a header.

    optimizer: a `TulaOptimizer`, held weakly.
    """

    def __init__(self, path: str, optimizer: Any, *, every_s: float | None = None) -> None:
        self._path = path
        self._start, self._scripted = optimizer.scripted_thresholds, optimizer.scripted_names
        self._apply = weakref.WeakMethod(optimizer.apply_thresholds)
        self._every_s = POLL_EVERY_S if every_s is None else every_s
        self._etag: str | None = None
        self._warned = False
        self._due = 0.0

    @property
    def wanted(self) -> bool:
        """False once the script has released its optimizer."""
        return self._apply() is not None

    def poll(self, transport: Transport) -> None:
        """Send one request if one is due; what is invalid in an answer is ignored, at first with a warning."""
        now = time.monotonic()
        if now < self._due or not self.wanted:
            return
        self._due = now + self._every_s
        reply = transport.get(self._path, self._etag)
        if reply.verdict != "delivered" or reply.body is None:
            return
        try:
            thresholds = self._start.updated(reply.body, scripted=self._scripted, warn=self._warn)
        except ValueError as error:
            self._warn(f"the service's thresholds of gradient scaling are ignored: {error}")
            return
        self._etag = reply.etag
        apply = self._apply()
        if apply is not None:
            apply(thresholds)

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            logger.warning("%s", sentence)
        self._warned = True
