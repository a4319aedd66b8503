"""Variants of a job: an instance type with one value of each option. A launch tells of its own variant first.

An unmeasured variant starts from the nearest measured one. Each switch between the two has an effect: as launches
measured that switch elsewhere, else as believed of its name before any launch. Logarithms of effects add, and each
further switch adds an interaction with a standard deviation of 0.25: on public tables, precision and compilation
together differ from the product of both by -0.12 to -0.56. Effects belong to the step without its waits for data;
loader workers act on these waits alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration
from tula_wire.options import Options

INTERACTION_SD: Final = 0.25
"""Of the logarithm of the compute, for each further switch."""
_LINKS_SD: Final = (
    0.5  # of log seconds of collectives: half precision does not halve them (0.4 to 0.8 on public tables)
)
_SINGLE: Final = frozenset({"fp32", "float32", "32", "32-true", "tf32", "no"})
_HALF: Final = frozenset(
    {"bf16", "bfloat16", "fp16", "float16", "half", "amp", "16", "16-mixed", "bf16-mixed", "16-true", "bf16-true"}
)
_OFF: Final = frozenset({"off", "no", "none", "false", "0"})
_WORKERS: Final = frozenset({"num_workers", "workers", "loader_workers", "dataloader_workers"})


class Variant(NamedTuple):
    """An instance type and the value of each option: what a posterior, a memory model and waits for data belong to."""

    instance_type: str = DEFAULT_INSTANCE_TYPE
    options: Options = ()

    def options_include(self, values: Options) -> bool:
        """Return True where these options have these values, whatever the others have."""
        return set(values) <= set(self.options)


def variant_of(configuration: Configuration) -> Variant:
    """Return the variant of a configuration."""
    return Variant(configuration.instance_type, configuration.options)


class Launch(NamedTuple):
    """The properties that one launch fixes: it can measure configurations that differ in the local batch alone."""

    instance_type: str
    num_nodes: int
    world_size: int
    grad_accum_steps: int
    options: Options = ()


def launch_of(configuration: Configuration) -> Launch:
    """Return the launch that can measure a configuration."""
    c = configuration
    return Launch(c.instance_type, c.num_nodes, c.world_size, c.grad_accum_steps, c.options)


def launches_of(configurations: Iterable[Configuration]) -> frozenset[Launch]:
    """Return the launches that can measure these configurations."""
    return frozenset(launch_of(c) for c in configurations)


class Switch(NamedTuple):
    """A change of one option from one value to another."""

    option: str
    before: str
    after: str


class Effect(NamedTuple):
    """What a switch does, in natural logarithms of factors, each with its standard deviation.

    `compute` is of the compute of a micro-step, `memory` of the bytes that one more example needs, and `loading` of the
    seconds that the loader takes for an example. Collectives keep their seconds, give or take `links_sd`.
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
    """Return what is believed of a switch before a launch, by the names of the option and of its values."""
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
    """Return how many switches from `start` to `options` join another that is on already, counted from the base."""
    made = len(switches(start, options))
    return made if switches(base, start) else max(made - 1, 0)


def nearest(variant: Variant, measured: Iterable[Variant], *, by: frozenset[str] = frozenset()) -> Variant | None:
    """Return the measured variant to start from: of the same type, then with equal options `by`, then with the fewest
    switches; the first of equals."""

    def distance(other: Variant) -> tuple[bool, int, int]:
        made = switches(other.options, variant.options)
        return other.instance_type != variant.instance_type, sum(s.option in by for s in made), len(made)

    return min(measured, key=distance, default=None)


def nearest_for_waits(variant: Variant, measured: Iterable[Variant]) -> Variant | None:
    """Return the measured variant whose waits for data are most like this one's: workers decide more than the rest."""
    return nearest(variant, measured, by=_WORKERS)
