"""Defines a job's options, which are placeholders in the launch command with several values to try.

The first value of an option is its base value, with which the script runs today. A configuration has one value for each
option of its job. The canonical form, which `complete` returns, is a tuple of name and value pairs sorted by name. On
the wire, the pairs are an object such as `{"compile": "off", "precision": "bf16"}`, and an option that a request omits
has its base value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Annotated, Any, Final, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, GetPydanticSchema, PlainSerializer

from tula_wire._base import Word

MAX_COMBINATIONS: Final = 64
"""The maximum number of combinations of a job's options, since the planner and the model consider all of them."""
MAX_OPTIONS: Final = 6
"""The maximum number of options of a job; with two values each, they have `MAX_COMBINATIONS` combinations."""
PLACEHOLDERS: Final = {
    "num_nodes": "number of nodes in this run",
    "ranks_per_node": "processes per node",
    "world_size": "total number of processes",
    "local_batch_size": "examples per process and micro-step",
    "global_batch_size": "examples per optimizer step",
    "grad_accum_steps": "micro-steps per optimizer step",
    "max_steps": "optimizer steps of the whole training at this batch: dataset.size x epochs / {global_batch_size}",
    "instance_type": "name of the instance type, as in the job's cluster",
    "checkpoint_dir": "folder for the run's checkpoints, which is the same after a restart",
    "learning_rate_factor": "learning rate of this batch divided by that of the job's smallest batch, according "
    "to the job's scaling rule; 1 in profiling runs and if the rule gives no factor",
    "resume": "checkpoint folder after a restart; at the first start, an argument that contains it is omitted",
    "run_id": "id of this run, which stays the same if an interrupted run is started again",
    "launch_id": "unique id of this launch, for example to name a cluster job",
    "env_file": 'a JSON file {"env_vars": {...}} with the TULA_* variables, for launchers that pass no environment',
}
"""The placeholders that Tula replaces in a launch command, with their meanings; options cannot have these names.

A placeholder is either an argument of `Template.fill` in `tula_client/launch/template.py` or a field of the
configuration.
"""

_NAME: Final = r"[a-z][a-z0-9_]{0,63}"
_WORD: Final = r"[A-Za-z0-9._:/@+-]{1,200}"

OptionName = Annotated[str, Field(pattern=f"^{_NAME}$")]
Options: TypeAlias = tuple[tuple[str, str], ...]
"""The name and value of each option, sorted by name, as a hashable tuple."""


def _as_object(value: Any) -> Any:
    return dict(value) if isinstance(value, tuple) else value


def _as_pairs(value: Mapping[str, str]) -> Options:
    return tuple(sorted(value.items()))


_OnTheWire = Annotated[
    dict[OptionName, Word],
    Field(max_length=MAX_OPTIONS),
    BeforeValidator(_as_object),
    AfterValidator(_as_pairs),
    PlainSerializer(dict, return_type=dict[str, str]),
]
ChosenOptions: TypeAlias = Annotated[
    Options, GetPydanticSchema(lambda _, handler: handler(_OnTheWire)), Field(json_schema_extra={"default": {}})
]
"""The type of a model field that is `Options` in Python and a JSON object on the wire."""


def _texts_only(value: Any) -> Any:
    """Return the options if all values are strings. Raises ValueError, with the remedy, for any other type."""
    for name, values in value.items() if isinstance(value, Mapping) else ():
        if isinstance(values, str):
            raise ValueError(f'{name} must be a list of values, as in ["{values}", "..."]')
        for word in values if isinstance(values, Sequence) else ():
            if isinstance(word, (bool, int, float)):
                text = str(word).lower()
                raise ValueError(f'{name} contains {text} without quotes: write it as a string, as in "{text}"')
    return value


def _checked(options: dict[str, list[str]]) -> dict[str, list[str]]:
    for name, values in options.items():
        if not re.fullmatch(_NAME, name):
            raise ValueError(
                f"{name!r} is not a valid option name: begin with a lowercase letter, then use only lowercase letters, "
                "digits and _"
            )
        if name in PLACEHOLDERS:
            raise ValueError(f"{{{name}}} is one of Tula's own placeholders: give the option {name!r} another name")
        for word in values:
            if not re.fullmatch(_WORD, word):
                raise ValueError(
                    f"{name} contains {word!r}, which a shell may not read as one word: use only letters, digits and "
                    ". _ : / @ + -"
                )
        if len(set(values)) < len(values):
            twice = next(word for word in values if values.count(word) > 1)
            raise ValueError(f"{name} contains {twice!r} more than once: remove the duplicate")
        if len(values) < 2:
            raise ValueError(
                f"{name} has fewer than two values: list today's value and at least one other, or write the value "
                "directly in the command"
            )
    if (combinations := prod(map(len, options.values()))) > MAX_COMBINATIONS:
        raise ValueError(
            f"these values make {combinations:,} combinations, but a job may have at most {MAX_COMBINATIONS}: remove "
            "values or options"
        )
    return options


OptionValues: TypeAlias = Annotated[dict[str, list[str]], BeforeValidator(_texts_only), AfterValidator(_checked)]
"""The values of each option of a job, keyed by the option's name; the base value comes first."""


def complete(options: Mapping[str, Sequence[str]], chosen: Options) -> Options:
    """Return the canonical form of `chosen`, with a value for each of a job's `options`, by default the base value.

    Raises ValueError if the job lacks an option in `chosen`, or if the option lacks the value; the message names the
    option and the remedy.
    """
    given = dict(chosen)
    for name, word in given.items():
        if name not in options:
            remedy = f"use {', '.join(sorted(options))}" if options else "list it under [options] in the job"
            raise ValueError(f"This job has no option {name!r}: {remedy}.")
        if word not in options[name]:
            raise ValueError(f"Option {name!r} of this job has no value {word!r}: use {', '.join(options[name])}.")
    return tuple((name, given.get(name, options[name][0])) for name in sorted(options))


def combinations(options: Mapping[str, Sequence[str]]) -> list[Options]:
    """Return every combination of the values of a job's `options` in canonical form; the base values come first."""
    names = sorted(options)
    return [tuple(zip(names, words, strict=True)) for words in product(*(options[name] for name in names))]
