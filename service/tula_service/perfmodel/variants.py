"""Variants of a job: an instance type with one value of each option. A launch is evidence mainly on its own variant.

An unmeasured variant starts from the nearest measured one. Each switch between the two has an effect, which is measured
if other launches differ in that switch, and otherwise assumed from its name. Logarithms of effects add, and each
further switch adds an interaction with a standard deviation of 0.25: on public tables, precision and compilation
together differ from the product of both by -0.12 to -0.56. Effects apply to the step without its waits for data; loader
workers affect only these waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from tula_service.perfmodel.map_fit import Posterior
from tula_service.perfmodel.points import Points
from tula_service.perfmodel.priors import Hardware, Priors, StepTimePrior, prior_from_jobs, prior_from_other_type
from tula_service.perfmodel.step_time_form import AT, COLLECTIVES, log_terms
from tula_wire.configurations import Configuration, Variant
from tula_wire.options import Options

INTERACTION_SD: Final = 0.25
"""Standard deviation of the logarithm of the compute for each further switch."""
_LINKS_SD: Final = (
    0.5  # of log seconds of collectives: half precision does not halve them (0.4 to 0.8 on public tables)
)
_SINGLE: Final = frozenset({"fp32", "float32", "32", "32-true", "tf32", "no"})
_HALF: Final = frozenset(
    {"bf16", "bfloat16", "fp16", "float16", "half", "amp", "16", "16-mixed", "bf16-mixed", "16-true", "bf16-true"}
)
_OFF: Final = frozenset({"off", "no", "none", "false", "0"})
_WORKERS: Final = frozenset({"num_workers", "workers", "loader_workers", "dataloader_workers"})


class Launch(NamedTuple):
    """The fixed properties of a launch, which measures configurations that differ only in the local batch."""

    instance_type: str
    num_nodes: int
    world_size: int
    grad_accum_steps: int
    options: Options = ()


def find_launch(configuration: Configuration) -> Launch:
    """Return the launch that can measure a configuration."""
    c = configuration
    return Launch(c.instance_type, c.num_nodes, c.world_size, c.grad_accum_steps, c.options)


def find_launches(configurations: Iterable[Configuration]) -> frozenset[Launch]:
    """Return the launches that can measure these configurations."""
    return frozenset(find_launch(c) for c in configurations)


class Switch(NamedTuple):
    """A change of one option from one value to another."""

    option: str
    before: str
    after: str


class Effect(NamedTuple):
    """The effects of a switch, as natural logarithms of factors, each with its standard deviation.

    `compute` is the effect on the compute of a micro-step, `memory` on the bytes that one more example needs, and
    `loading` on the seconds that the loader takes per example. The time of collectives does not change, within
    `links_sd`.
    """

    compute: float = 0.0
    compute_sd: float = 0.5
    links_sd: float = _LINKS_SD
    memory: float = 0.0
    memory_sd: float = 0.25
    loading: float = 0.0


_UNKNOWN: Final = Effect()  # wide: bf16 made MobileNet 9 % slower
_HALF_PRECISION: Final = Effect(math.log(0.6), 0.4, memory=math.log(0.6))
_COMPILED: Final = Effect(math.log(0.85), 0.15)
_CHECKPOINTED: Final = Effect(math.log(4.0 / 3.0), 0.2, memory=math.log(0.4), memory_sd=0.42)  # a factor of two


def switches(before: Options, after: Options) -> list[Switch]:
    """Return the options in which two variants differ."""
    held = dict(before)
    return [Switch(name, held.get(name, value), value) for name, value in after if held.get(name, value) != value]


def believed_effect(switch: Switch) -> Effect:
    """Return the assumed effect of a switch before a launch, from the names of the option and its values."""
    name, before, after = (part.lower() for part in switch)
    if name in _WORKERS and before.isdigit() and after.isdigit() and int(before) and int(after):
        return Effect(0.0, 0.02, links_sd=0.0, memory_sd=0.02, loading=math.log(int(before) / int(after)))
    if name == "precision":
        return _directed(_HALF_PRECISION, before in _SINGLE and after in _HALF, before in _HALF and after in _SINGLE)
    if name in ("compile", "checkpointing"):
        effect = _COMPILED if name == "compile" else _CHECKPOINTED
        return _directed(effect, before in _OFF and after not in _OFF, before not in _OFF and after in _OFF)
    return _UNKNOWN


def _directed(effect: Effect, forwards: bool, backwards: bool) -> Effect:
    """Return the effect of switching on, of switching off, or an unknown one."""
    if backwards:
        return effect._replace(compute=-effect.compute, memory=-effect.memory)
    return effect if forwards else _UNKNOWN


def further_switches(start: Options, base: Options, options: Options) -> int:
    """Return how many switches from `start` to `options` are made while another is on, relative to the base."""
    made = len(switches(start, options))
    return made if switches(base, start) else max(made - 1, 0)


def nearest(variant: Variant, measured: Iterable[Variant], *, by: frozenset[str] = frozenset()) -> Variant | None:
    """Return the measured variant to start from, the first among equals, or None.

    A variant of the same type is preferred, then one with equal options `by`, then the one with the fewest switches.
    """

    def distance(other: Variant) -> tuple[bool, int, int]:
        made = switches(other.options, variant.options)
        return other.instance_type != variant.instance_type, sum(s.option in by for s in made), len(made)

    return min(measured, key=distance, default=None)


def nearest_for_waits(variant: Variant, measured: Iterable[Variant]) -> Variant | None:
    """Return the measured variant whose waits for data are most similar; the number of workers matters most."""
    return nearest(variant, measured, by=_WORKERS)


def prior_of_variant(variant: Variant, posteriors: Mapping[Variant, Posterior], priors: Priors) -> StepTimePrior | None:
    """Return the prior of a variant from the runs of the nearest measured variant and the effects of the switches.

    On a type without runs, the scale from earlier jobs may be better than the scale from runs on another type.
    """
    own, start = priors.believed.get(variant.instance_type), nearest(variant, posteriors)
    if start is None:
        return own if own is None else _after_switches(own, priors.base, variant, posteriors, priors.base)
    measured = posteriors[start].as_prior()
    if start.instance_type == variant.instance_type:
        return _after_switches(_measured_elsewhere(measured), start.options, variant, posteriors, priors.base)
    hardware = (priors.hardware.get(end.instance_type, Hardware()) for end in (start, variant))
    carried = prior_from_other_type(measured, *hardware)
    if own is not None and own.absolute and own.sd[AT.compute] < carried.sd[AT.compute]:
        return _after_switches(own, priors.base, variant, posteriors, priors.base)
    return _after_switches(carried, start.options, variant, posteriors, priors.base)


def _after_switches(
    prior: StepTimePrior, start: Options, variant: Variant, posteriors: Mapping[Variant, Posterior], base: Options
) -> StepTimePrior:
    """Return the prior of a variant, given the prior of the same instance type with the options `start`."""
    effects = [_effect(switch, variant, posteriors) for switch in switches(start, variant.options)]
    return switched(prior, effects, further_switches(start, base, variant.options))


def _effect(switch: Switch, variant: Variant, posteriors: Mapping[Variant, Posterior]) -> Effect:
    """Return the effect of a switch from two measured variants that differ only in it, else the assumed effect.

    Among several pairs, the one with the most in common with `variant` is used.
    """
    pairs: dict[Variant, Variant] = {}
    for variant_after in posteriors:
        if (switch.option, switch.after) in variant_after.options:
            swapped = dict(variant_after.options) | {switch.option: switch.before}
            before = variant_after._replace(options=tuple(sorted(swapped.items())))
            if before in posteriors:
                pairs[variant_after] = before
    like = nearest(variant, pairs)
    if like is None:
        return believed_effect(switch)
    ends = [posteriors[like], posteriors[pairs[like]]]
    at = Points([1.0], [1.0], [ends[0].reference_batch_size])
    log_after, log_before = (
        float(log_terms(end.leading.theta, at, end.reference_batch_size, end.prior.slow_from).compute[0])
        for end in ends
    )
    elsewhere = INTERACTION_SD if like.instance_type != variant.instance_type else 0.0
    spread = math.hypot(*(end.as_prior().sd[AT.compute] for end in ends), elsewhere)
    return Effect(log_after - log_before, spread, links_sd=INTERACTION_SD)


def _measured_elsewhere(learnt: StepTimePrior) -> StepTimePrior:
    """Return the prior of another variant of the same job and instance type, before the effect of its switches.

    The compute scale is the measured one; the shape may differ as much as between jobs.
    """
    shape = prior_from_jobs([learnt])
    sd = shape.sd.copy()
    sd[AT.compute] = learnt.sd[AT.compute]
    return replace(shape, sd=sd)


def switched(prior: StepTimePrior, effects: Sequence[Effect], further: int) -> StepTimePrior:
    """Return the prior after switches with these effects, of which `further` are made while another switch is on.

    The effects are added to the logarithm of the compute; the time of collectives does not change.
    """
    if not effects:
        return prior
    mean, sd, collectives = prior.mean.copy(), prior.sd.copy(), list(COLLECTIVES)
    log_compute = sum(effect.compute for effect in effects)
    mean[AT.compute] += log_compute
    mean[collectives] -= log_compute
    interaction = INTERACTION_SD * math.sqrt(further)
    sd[AT.compute] = math.hypot(sd[AT.compute], *(effect.compute_sd for effect in effects), interaction)
    sd[collectives] = np.hypot(sd[collectives], max(effect.links_sd for effect in effects))
    return replace(prior, mean=mean, sd=sd)
