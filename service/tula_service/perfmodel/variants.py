"""Predicts the variants of a job, each of which is an instance type with one value of each option.

A launch mainly provides evidence about its own variant. The prediction of an unmeasured variant starts from the nearest
measured variant. Each option in which the two variants differ is a switch with an effect. The effect is measured if two
measured variants differ only in this switch; otherwise, an effect is assumed based on the option's name. The logarithms
of the effects are added. Each further switch adds an interaction with a standard deviation of 0.25, because in public
tables the logarithm of the joint effect of precision and compilation differs from the sum of the two logarithms by
-0.12 to -0.56. Effects apply to steps without waits for data; the number of loader workers affects only these waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from tula_service.perfmodel.map_fit import Posterior
from tula_service.perfmodel.points import Points
from tula_service.perfmodel.priors import (
    Hardware,
    Priors,
    StepTimePrior,
    generic_prior,
    prior_from_other_type,
)
from tula_service.perfmodel.step_time_form import AT, COLLECTIVES, NUM_PARAMETERS, log_terms
from tula_wire.configurations import Configuration, Variant
from tula_wire.options import Options

_BETWEEN_VARIANTS: Final = (
    np.array([0.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]) * generic_prior().sd
)  # in the order of `AT`: c, the three parameters of the shape of compute, and all others
"""Standard deviation of each parameter's difference between two variants of a job, without the effects of switches.

The compute scale differs only by these effects, which have errors of their own.
"""
INTERACTION_SD: Final = 0.25
"""The standard deviation that each further switch adds to log compute time."""
_LINKS_SD: Final = (
    0.5  # of log seconds of collectives; half precision multiplies them by 0.4 to 0.8 on public tables, not by 0.5
)
_SINGLE: Final = frozenset({"fp32", "float32", "32", "32-true", "tf32", "no"})
_HALF: Final = frozenset(
    {"bf16", "bfloat16", "fp16", "float16", "half", "amp", "16", "16-mixed", "bf16-mixed", "16-true", "bf16-true"}
)
_OFF: Final = frozenset({"off", "no", "none", "false", "0"})
_WORKERS: Final = frozenset({"num_workers", "workers", "loader_workers", "dataloader_workers"})


class Launch(NamedTuple):
    """A launch; its configurations all have these properties and differ only in the local batch."""

    instance_type: str
    num_nodes: int
    world_size: int
    grad_accum_steps: int
    options: Options = ()


def find_launch(configuration: Configuration) -> Launch:
    """Return the launch in which a configuration can be measured."""
    c = configuration
    return Launch(c.instance_type, c.num_nodes, c.world_size, c.grad_accum_steps, c.options)


def find_launches(configurations: Iterable[Configuration]) -> frozenset[Launch]:
    """Return the launches in which these configurations can be measured."""
    return frozenset(find_launch(c) for c in configurations)


class Switch(NamedTuple):
    """A change of the value of one option."""

    option: str
    before: str
    after: str


class Effect(NamedTuple):
    """The effects of a switch, as natural logarithms of factors and their standard deviations.

    `compute` is the effect on the compute time of a micro-step, `memory` on the bytes that each further example needs,
    and `loading` on the seconds that the loader takes per example. The expected time of the collectives does not
    change; `links_sd` is the standard deviation of its logarithm.
    """

    compute: float = 0.0
    compute_sd: float = 0.5
    links_sd: float = _LINKS_SD
    memory: float = 0.0
    memory_sd: float = 0.25
    loading: float = 0.0


_UNKNOWN: Final = Effect()  # the defaults are wide, because effects can be adverse: bf16 slowed MobileNet by 9 %
_HALF_PRECISION: Final = Effect(math.log(0.6), 0.4, memory=math.log(0.6))
_COMPILED: Final = Effect(math.log(0.85), 0.15)
_CHECKPOINTED: Final = Effect(math.log(4.0 / 3.0), 0.2, memory=math.log(0.4), memory_sd=0.42)  # a factor of two


def switches(before: Options, after: Options) -> list[Switch]:
    """Return the switches that lead from the options `before` to the options `after`."""
    held = dict(before)
    return [Switch(name, held.get(name, value), value) for name, value in after if held.get(name, value) != value]


def believed_effect(switch: Switch) -> Effect:
    """Return the assumed effect of an unmeasured switch, based on the names of the option and its values."""
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
    """Return the effect if the switch is `forwards`, its inverse if the switch is `backwards`, or else `_UNKNOWN`."""
    if backwards:
        return effect._replace(compute=-effect.compute, memory=-effect.memory)
    return effect if forwards else _UNKNOWN


def further_switches(start: Options, base: Options, options: Options) -> int:
    """Return how many switches from `start` to `options` happen while another option differs from its base value."""
    made = len(switches(start, options))
    return made if switches(base, start) else max(made - 1, 0)


def nearest(variant: Variant, measured: Iterable[Variant], *, by: frozenset[str] = frozenset()) -> Variant | None:
    """Return the measured variant that is nearest to `variant`, or None if there is no measured variant.

    Variants of the same instance type are nearer than all others. Variants are then compared by how many of the options
    in `by` differ, and finally by how many of all options differ. In a tie, the first variant is returned.
    """

    def distance(other: Variant) -> tuple[bool, int, int]:
        made = switches(other.options, variant.options)
        return other.instance_type != variant.instance_type, sum(s.option in by for s in made), len(made)

    return min(measured, key=distance, default=None)


def nearest_for_waits(variant: Variant, measured: Iterable[Variant]) -> Variant | None:
    """Return the measured variant nearest to `variant`, comparing the loader workers before all other options."""
    return nearest(variant, measured, by=_WORKERS)


class Start(NamedTuple):
    """The prior knowledge about a variant, which does not include its own runs.

    `prior` is its prior, or None if nothing is known. `posterior` is the posterior of the measured variant that has the
    same residual, or None if there is no such variant.
    """

    prior: StepTimePrior | None
    posterior: Posterior | None = None


def start_of_variant(variant: Variant, posteriors: Mapping[Variant, Posterior], priors: Priors) -> Start:
    """Return the start of a variant, from the nearest measured variant and the effects of the switches between the two.

    The two share their residual if they have the same instance type. If the variant's instance type has no runs, the
    prior from earlier jobs is used if it determines the compute scale more precisely than runs on another type do.
    """
    own, start = priors.believed.get(variant.instance_type), nearest(variant, posteriors)
    if start is None:
        return Start(own and _after_switches(own, priors.base, variant, posteriors, priors.base))
    measured = posteriors[start].as_prior()
    if start.instance_type == variant.instance_type:
        wider = measured.widened(_BETWEEN_VARIANTS)
        prior = _after_switches(wider, start.options, variant, posteriors, priors.base)
        return Start(prior, posteriors[start])
    hardware = (priors.hardware.get(end.instance_type, Hardware()) for end in (start, variant))
    carried = prior_from_other_type(measured, *hardware)
    if own is not None and own.absolute and own.sd[AT.compute] < carried.sd[AT.compute]:
        return Start(_after_switches(own, priors.base, variant, posteriors, priors.base))
    return Start(_after_switches(carried, start.options, variant, posteriors, priors.base))


def _after_switches(
    prior: StepTimePrior, start: Options, variant: Variant, posteriors: Mapping[Variant, Posterior], base: Options
) -> StepTimePrior:
    """Return the prior of a variant, given the prior of its instance type with the options `start`."""
    effects = [_effect(switch, variant, posteriors) for switch in switches(start, variant.options)]
    return switched(prior, effects, further_switches(start, base, variant.options))


def _effect(switch: Switch, variant: Variant, posteriors: Mapping[Variant, Posterior]) -> Effect:
    """Return the effect of a switch, measured on two variants that differ only in this switch, or else assumed.

    If there are several pairs of such variants, the pair that is nearest to `variant` is used.
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
    # Too wide if one end started from the other, since their errors are then partly the same.
    spread = math.hypot(*(end.as_prior().sd[AT.compute] for end in ends), elsewhere)
    return Effect(log_after - log_before, spread, links_sd=INTERACTION_SD)


def switched(prior: StepTimePrior, effects: Sequence[Effect], further: int) -> StepTimePrior:
    """Return the prior after switches with these effects; `further` of them interact with another switch.

    The effects are added to the logarithm of the compute time; the expected time of collectives does not change.
    """
    if not effects:
        return prior
    mean, sd, collectives = prior.mean.copy(), np.zeros(NUM_PARAMETERS), list(COLLECTIVES)
    log_compute = sum(effect.compute for effect in effects)
    mean[AT.compute] += log_compute
    mean[collectives] -= log_compute
    interaction = INTERACTION_SD * math.sqrt(further)
    sd[AT.compute] = math.hypot(*(effect.compute_sd for effect in effects), interaction)
    sd[collectives] = max(effect.links_sd for effect in effects)
    return replace(prior, mean=mean).widened(sd)
