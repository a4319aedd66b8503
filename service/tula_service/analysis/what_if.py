"""What-if questions: the specification at another price or deadline, and the configurations that one asks about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tula_wire as wire
from tula_service.analysis.answer import Answer
from tula_service.errors import InvalidInput
from tula_wire import Configuration
from tula_wire.bounds import MAX_DURATION_S, MAX_USD_PER_HOUR

MOST_CONFIGURATIONS = 1024


@dataclass(frozen=True)
class WhatIf:
    """A question: every combination of these values; an empty list means every value of the job's candidates.

    `global_batch_size` and `local_batch_size` exclude each other; no global batch may exceed the data set. Price and
    deadline replace those of the job.
    """

    num_nodes: Sequence[int] = ()
    global_batch_size: Sequence[int] = ()
    local_batch_size: Sequence[int] = ()
    instance_type: Sequence[str] = ()
    usd_per_node_hour: float | None = None
    deadline_s: float | None = None


def specification_at(spec: wire.JobSpec, question: WhatIf) -> wire.JobSpec:
    """The specification with the price and the deadline of the question. Raises InvalidInput."""
    for name, most in (("usd_per_node_hour", MAX_USD_PER_HOUR), ("deadline_s", MAX_DURATION_S)):
        value = getattr(question, name)
        if value is not None and not 0 < value <= most:
            raise InvalidInput(f"{name} is {value:g}: send a number above 0 and at most {most:g}.", field=name)
    changed: dict[str, object] = {}
    if question.deadline_s is not None:
        changed["limits"] = spec.limits.model_copy(update={"deadline_s": question.deadline_s})
    if question.usd_per_node_hour is not None:
        price = wire.Price(usd_per_node_hour=question.usd_per_node_hour)
        changed["cluster"] = [cluster.model_copy(update={"price": price}) for cluster in spec.cluster]
    return spec.model_copy(update=changed)


def configurations_of(answer: Answer, question: WhatIf) -> tuple[Configuration, ...]:
    """Every configuration that the question asks about, sorted. Raises InvalidInput for none or too many."""
    spec = answer.data.spec
    _check(spec, question)
    found: set[Configuration] = set()
    for cluster in spec.cluster:
        name = cluster.instance_type
        if question.instance_type and name not in question.instance_type:
            continue
        candidates = [c for c in answer.evidence.candidates if c.instance_type == name]
        for nodes in question.num_nodes or sorted({c.num_nodes for c in candidates}):
            found |= _on_cluster(cluster, nodes, candidates, question)
            if len(found) > MOST_CONFIGURATIONS:
                raise InvalidInput(
                    f"This asks for more than {MOST_CONFIGURATIONS} configurations: ask for fewer.", field="num_nodes"
                )
    size = spec.dataset.size
    beyond = {c for c in found if c.global_batch_size > size}
    if beyond and (beyond == found or (question.num_nodes and question.local_batch_size)):
        field = "local_batch_size" if question.local_batch_size else "num_nodes"
        raise _too_large(max(c.global_batch_size for c in beyond), size, field)
    if not found:
        worlds = sorted({cluster.ranks_per_node for cluster in spec.cluster})
        raise InvalidInput(
            "No configuration has this global batch: it must be a multiple of num_nodes times ranks_per_node "
            f"({', '.join(map(str, worlds))}).",
            field="global_batch_size",
        )
    return tuple(sorted(found - beyond))


def _check(spec: wire.JobSpec, question: WhatIf) -> None:
    """Raise InvalidInput for values that contradict each other or the job."""
    if question.global_batch_size and question.local_batch_size:
        raise InvalidInput(
            "Give global_batch_size or local_batch_size, not both: each follows from the other.",
            field="local_batch_size",
        )
    for total in question.global_batch_size:
        if total > spec.dataset.size:
            raise _too_large(total, spec.dataset.size, "global_batch_size")
    known = [cluster.instance_type for cluster in spec.cluster]
    for name in question.instance_type:
        if name not in known:
            raise InvalidInput(
                f"Instance type {name!r} is not in this job's cluster: use {', '.join(known)}.", field="instance_type"
            )


def _on_cluster(
    cluster: wire.ClusterSpec, nodes: int, candidates: Sequence[Configuration], question: WhatIf
) -> set[Configuration]:
    """The configurations asked about on so many nodes of one instance type."""
    found: set[Configuration] = set()
    world = nodes * cluster.ranks_per_node
    batches = list(question.local_batch_size)
    if question.global_batch_size:
        batches = [total // world for total in question.global_batch_size if total % world == 0]
        accumulating = [c for c in candidates if c.num_nodes == nodes and c.grad_accum_steps > 1]
        found.update(c for c in accumulating if c.global_batch_size in question.global_batch_size)
    elif not batches:
        found.update(c for c in candidates if c.num_nodes == nodes)
        if question.num_nodes:
            batches = sorted({c.local_batch_size for c in candidates if c.grad_accum_steps == 1})
    return found | {
        Configuration(
            num_nodes=nodes,
            ranks_per_node=cluster.ranks_per_node,
            local_batch_size=batch,
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
