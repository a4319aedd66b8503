"""What-if questions: the specification at another price or deadline, and the configurations that one asks about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

import tula_wire as wire
from tula_service.analysis.answer import Answer
from tula_service.errors import InvalidInput
from tula_wire import Configuration
from tula_wire.bounds import MAX_DURATION_S, MAX_USD_PER_HOUR

MOST_CONFIGURATIONS = 1024
_Counts = list[Annotated[int, Field(ge=1, le=2**31 - 1)]]


class WhatIf(BaseModel):
    """A question: every combination of these values; an empty list means every value of the job's candidates.

    `global_batch_size` and `local_batch_size` exclude each other; no global batch may exceed the data set. Price and
    deadline replace those of the job.
    """

    model_config = ConfigDict(frozen=True)

    num_nodes: _Counts = Field([], max_length=64, description="Numbers of nodes.")
    global_batch_size: _Counts = Field([], max_length=64, description="Examples per step.")
    local_batch_size: _Counts = Field([], max_length=64, description="Examples per rank.")
    instance_type: list[str] = Field([], max_length=16, description="Instance types of the job.")
    usd_per_node_hour: float | None = Field(
        None,
        gt=0,
        le=MAX_USD_PER_HOUR,
        allow_inf_nan=False,
        description="US dollars per node-hour, not the job's.",
    )
    deadline_s: float | None = Field(
        None, gt=0, le=MAX_DURATION_S, allow_inf_nan=False, description="Seconds that the whole training may take."
    )


def specification_at(spec: wire.JobSpec, question: WhatIf) -> wire.JobSpec:
    """The specification with the price and the deadline of the question."""
    changed: dict[str, object] = {}
    if question.deadline_s is not None:
        changed["limits"] = spec.limits.model_copy(update={"deadline_s": question.deadline_s})
    if question.usd_per_node_hour is not None:
        price = wire.Price(usd_per_node_hour=question.usd_per_node_hour)
        changed["cluster"] = [cluster.model_copy(update={"price": price}) for cluster in spec.cluster]
    return spec.model_copy(update=changed)


def configurations_of(answer: Answer, question: WhatIf) -> tuple[Configuration, ...]:
    """Every configuration that the question asks about, sorted. Raises InvalidInput for none or too many."""
    spec, size = answer.data.spec, answer.data.spec.dataset.size
    _check(spec, question)
    found: set[Configuration] = set()
    for cluster in spec.cluster:
        if question.instance_type and cluster.instance_type not in question.instance_type:
            continue
        candidates = [c for c in answer.evidence.candidates if c.instance_type == cluster.instance_type]
        for nodes in question.num_nodes or sorted({c.num_nodes for c in candidates}):
            found |= _on_cluster(cluster, nodes, spec.batch.grad_accum_steps, candidates, question)
            if len(found) > MOST_CONFIGURATIONS:
                raise InvalidInput(
                    f"This asks for more than {MOST_CONFIGURATIONS} configurations: ask for fewer.", field="num_nodes"
                )
    fitting = {c for c in found if c.global_batch_size <= size}
    if not found:
        ranks = {cluster.ranks_per_node for cluster in spec.cluster}
        worlds = sorted({nodes * each for nodes in question.num_nodes or (1,) for each in ranks})
        most = max(cluster.max_nodes for cluster in spec.cluster)
        beyond = f" The job goes up to {most} nodes." if max(question.num_nodes, default=0) > most else ""
        raise InvalidInput(
            "No configuration has this global batch: it must be a multiple of the number of ranks "
            f"({', '.join(map(str, worlds))}).{beyond}",
            field="global_batch_size",
        )
    if not fitting or (fitting != found and question.num_nodes and question.local_batch_size):
        largest = max(c.global_batch_size for c in found)
        raise _too_large(largest, size, "local_batch_size" if question.local_batch_size else "num_nodes")
    return tuple(sorted(fitting))


def _check(spec: wire.JobSpec, question: WhatIf) -> None:
    """Raise InvalidInput for values that contradict each other or the job."""
    largest = max(question.global_batch_size, default=0)
    if largest and question.local_batch_size:
        raise InvalidInput(
            "Give global_batch_size or local_batch_size, not both: each follows from the other.",
            field="local_batch_size",
        )
    if largest > spec.dataset.size:
        raise _too_large(largest, spec.dataset.size, "global_batch_size")
    known = [cluster.instance_type for cluster in spec.cluster]
    for name in question.instance_type:
        if name not in known:
            raise InvalidInput(
                f"Instance type {name!r} is not in this job's cluster: use {', '.join(known)}.", field="instance_type"
            )


def _on_cluster(
    cluster: wire.ClusterSpec, nodes: int, held: int | None, candidates: Sequence[Configuration], question: WhatIf
) -> set[Configuration]:
    """The configurations asked about on so many nodes of one instance type: candidates, and others by their batch.

    held: the micro-steps of every step of the job, if its script holds them.
    """
    world, totals = nodes * cluster.ranks_per_node * (held or 1), question.global_batch_size
    batches = question.local_batch_size or [total // world for total in totals if total % world == 0]
    if question.num_nodes and not (totals or batches):
        batches = [c.local_batch_size for c in candidates if c.grad_accum_steps == (held or 1)]
    asked = [c for c in candidates if c.num_nodes == nodes and not question.local_batch_size]
    found = {c for c in asked if not totals or c.global_batch_size in totals}
    return found | {
        Configuration(
            num_nodes=nodes,
            ranks_per_node=cluster.ranks_per_node,
            local_batch_size=batch,
            grad_accum_steps=held or 1,
            instance_type=cluster.instance_type,
        )
        for batch in batches
        if batch >= 1
    }


def _too_large(total: int, size: int, field: str) -> InvalidInput:
    return InvalidInput(
        f"A global batch of {total} is more than the data set's {size} examples, so that no epoch has a whole step: "
        f"ask for a smaller {field}.",
        field=field,
    )
