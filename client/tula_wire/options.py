"""Options of a job: words of its launch command with several values, such as the precision or the loader workers.

The first value of an option is its base, with which the script runs today. A configuration has one value of each option
of its job, as pairs sorted by name: the canonical form, which `complete` makes. On the wire, these pairs are an object
such as `{"compile": "off", "precision": "bf16"}`, and an option that a request omits has its base value.
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
"""Most combinations of a job's options, since the planner and the model consider every combination."""
MAX_OPTIONS: Final = 6
"""Most options of a job; with two values each, they have `MAX_COMBINATIONS` combinations."""
PLACEHOLDERS: Final = {
    "num_nodes": "nodes of this run",
    "ranks_per_node": "processes per node",
    "world_size": "processes in all",
    "local_batch_size": "examples per process and micro-step",
    "global_batch_size": "examples per optimizer step",
    "grad_accum_steps": "micro-steps per optimizer step",
    "max_steps": "optimizer steps of the whole training at this batch: dataset.size x epochs / {global_batch_size}",
    "instance_type": "name of the instance type, as in the job's cluster",
    "checkpoint_dir": "folder for the run's checkpoints; the same at a restart",
    "learning_rate_factor": "learning rate of this batch over that of the job's smallest, by the job's scaling rule; 1 "
    "in profiling runs and where the rule has no answer",
    "resume": "checkpoint directory on a restart; an argument that holds it is left out at the first start",
    "run_id": "id of this run; stays the same when an interrupted run is started again",
    "launch_id": "unique id of this start, for example as the name of a cluster job",
    "env_file": 'a JSON file {"env_vars": {...}} with the TULA_* variables, for launchers that pass no environment',
}
"""The words that Tula fills into a launch command, with their meanings; no option can have such a name.

Words that are not arguments of `Template.fill` in `tula_client/launch/template.py` are fields of the configuration.
"""

_NAME: Final = r"[a-z][a-z0-9_]{0,63}"
_WORD: Final = r"[A-Za-z0-9._:/@+-]{1,200}"

OptionName = Annotated[str, Field(pattern=f"^{_NAME}$")]
Options: TypeAlias = tuple[tuple[str, str], ...]
"""Name and value of each option, sorted by name; hashable."""


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
"""`Options` in Python, an object on the wire."""


def _texts_only(value: Any) -> Any:
    """Refuse numbers and booleans, which TOML also has."""
    for name, values in value.items() if isinstance(value, Mapping) else ():
        if isinstance(values, str):
            raise ValueError(f'{name} holds one value: give a list of them, as in ["{values}", "..."]')
        for word in values if isinstance(values, Sequence) else ():
            if isinstance(word, (bool, int, float)):
                text = str(word).lower()
                raise ValueError(f'{name} holds {text} without quotes: write the word for the command, as in "{text}"')
    return value


def _checked(options: dict[str, list[str]]) -> dict[str, list[str]]:
    for name, values in options.items():
        if not re.fullmatch(_NAME, name):
            raise ValueError(
                f"{name!r} cannot name an option: begin with a small letter, then use small letters, digits and _"
            )
        if name in PLACEHOLDERS:
            raise ValueError(f"Tula fills the placeholder {{{name}}} itself: give the option {name!r} another name")
        for word in values:
            if not re.fullmatch(_WORD, word):
                raise ValueError(
                    f"{name} holds {word!r}, which a shell may not take as one word: use letters, digits and . _ : / @ "
                    "+ -"
                )
        if len(set(values)) < len(values):
            twice = next(word for word in values if values.count(word) > 1)
            raise ValueError(f"{name} holds {twice!r} twice: give each value once")
        if len(values) < 2:
            raise ValueError(
                f"{name} has fewer than two values: give what runs today and what else to try, or write the word into "
                "the command"
            )
    if (combinations := prod(map(len, options.values()))) > MAX_COMBINATIONS:
        raise ValueError(
            f"these values make {combinations:,} combinations, and a job may have {MAX_COMBINATIONS}: leave values or "
            "options out"
        )
    return options


OptionValues: TypeAlias = Annotated[dict[str, list[str]], BeforeValidator(_texts_only), AfterValidator(_checked)]
"""The values of each option of a job, keyed by its name, the base first."""


def complete(options: Mapping[str, Sequence[str]], chosen: Options) -> Options:
    """Return the canonical form of `chosen`: a value for each of a job's `options`, by default the base.

    Raises ValueError with the name and the remedy if the job has no such option, or the option has no such value.
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
    """Return every combination of the values of a job's `options` in canonical form, the base first."""
    names = sorted(options)
    return [tuple(zip(names, words, strict=True)) for words in product(*(options[name] for name in names))]
