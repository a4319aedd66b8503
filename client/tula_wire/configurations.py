"""Defines the configuration of a run, which consists of the number of nodes, the batch and the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pydantic import ConfigDict, Field

from tula_wire._base import Count, Word
from tula_wire.options import ChosenOptions, Options

DEFAULT_INSTANCE_TYPE: Final = "default"


class Variant(NamedTuple):
    """An instance type and a value for each option.

    Posteriors, memory models and data waits are fitted separately for each variant.
    """

    instance_type: str = DEFAULT_INSTANCE_TYPE
    options: Options = ()

    def options_include(self, values: Options) -> bool:
        """Return True if this variant has all the given option values, regardless of its other options."""
        return set(values) <= set(self.options)


@dataclass(frozen=True, order=True, kw_only=True)
class Configuration:
    """One way to run a job; the global batch is local batch x accumulation x world size.

    The constructor validates nothing, because the service creates and hashes thousands of configurations. Pydantic
    validates a configuration only as a field of a model such as `RunCreate`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", revalidate_instances="always")

    num_nodes: Annotated[Count, Field(description="Number of nodes.")]
    ranks_per_node: Annotated[Count, Field(description="Processes (accelerators) per node.")] = 1
    local_batch_size: Annotated[Count, Field(description="Examples per rank and micro-step.")]
    grad_accum_steps: Annotated[Count, Field(description="Micro-steps per optimizer step.")] = 1
    instance_type: Annotated[Word, Field(description="Name of the instance type, as in the job's `cluster`.")] = (
        DEFAULT_INSTANCE_TYPE
    )
    options: Annotated[
        ChosenOptions, Field(description="Value of each option of the job; an omitted option has its first value.")
    ] = ()

    @property
    def world_size(self) -> int:
        """Return the total number of ranks."""
        return self.num_nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Return the number of examples per optimizer step."""
        return self.local_batch_size * self.grad_accum_steps * self.world_size

    @property
    def variant(self) -> Variant:
        """Return the variant of this configuration, which is its instance type and options without nodes and batch."""
        return Variant(self.instance_type, self.options)

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary that can be written as JSON, with the options as a nested dictionary."""
        return asdict(self) | {"options": dict(self.options)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Configuration:
        """Return the configuration with these field values, which `as_json` returned; ignore unknown keys."""
        given = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**given | {"options": tuple(sorted(given.get("options", {}).items()))})
