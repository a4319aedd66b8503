"""Answers the three questions that require a fit; each function uses plain data, so another process can call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

import tula_wire as wire
from tula_service.analysis import explanation
from tula_service.analysis.answer import Analysis, Answer, analyse
from tula_service.analysis.job_data import JobData
from tula_service.analysis.plan import PlanDecision, decide_plan
from tula_service.errors import InvalidInput
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import Estimate
from tula_wire import Configuration
from tula_wire.bounds import MAX_DURATION_S, MAX_USD_PER_HOUR
from tula_wire.enums import Basis, Objective
from tula_wire.options import MAX_OPTIONS, Options, complete

MOST_CONFIGURATIONS = 1024
_Counts = list[Annotated[int, Field(ge=1, le=2**31 - 1)]]
_WITHOUT_IDENTITY: Final = {"id": "", "job_id": "", "created_at": "1970-01-01T00:00:00Z"}


@dataclass(frozen=True)
class Findings:
    """The part of the answer to "which configuration?" that is stored for one version of a job's data.

    `body` is the JSON of a `wire.Recommendation` without `id`, `job_id` and `created_at`. `savings` contains the
    fractions of time that the choice saves relative to the smallest and the largest batch. `run_ids` contains the ids
    of the fitted runs, and `prices` the specified prices by instance type. `decision` is the plan, or None if the
    caller did not request one.
    """

    data_version: int
    objective: Objective
    basis: Basis
    chosen: wire.Candidate | None
    savings: tuple[float | None, float | None]
    interval_scale: float | None
    run_ids: tuple[str, ...]
    prices: Mapping[str, Mapping[str, Any]]
    body: str
    decision: PlanDecision | None = None


class WhatIf(BaseModel):
    """A question about all combinations of the given values; an empty list means all values of the job's candidates.

    `global_batch_size` and `local_batch_size` are mutually exclusive, and a global batch must not exceed the data set.
    The price and the deadline in the question replace those of the job.
    """

    model_config = ConfigDict(frozen=True)

    num_nodes: _Counts = Field([], max_length=64, description="Numbers of nodes.")
    global_batch_size: _Counts = Field([], max_length=64, description="Examples per step.")
    local_batch_size: _Counts = Field([], max_length=64, description="Examples per rank.")
    instance_type: list[str] = Field([], max_length=16, description="Instance types of the job.")
    option: list[str] = Field(
        [],
        max_length=MAX_OPTIONS,
        description="Option values such as `precision=bf16`; all other options have their recommended values.",
    )
    usd_per_node_hour: float | None = Field(
        None,
        gt=0,
        le=MAX_USD_PER_HOUR,
        allow_inf_nan=False,
        description="Price in US dollars per node-hour, which replaces the job's price.",
    )
    deadline_s: float | None = Field(
        None, gt=0, le=MAX_DURATION_S, allow_inf_nan=False, description="Seconds that the whole training run may take."
    )


def report_findings(data: JobData, objective: Objective | None = None, plan: bool = False) -> Findings:
    """Return the findings from one fit, including a decision on what to profile next if `plan` is True.

    By default, the job's objective is used.
    """
    analysis = analyse(data, objective)
    decision = decide_plan(analysis) if plan else None
    fields = _WITHOUT_IDENTITY | _rendered(analysis, decision)
    recommendation = wire.Recommendation.model_validate(fields)
    answer = analysis if isinstance(analysis, Answer) else None
    return Findings(
        data_version=data.data_version,
        objective=analysis.objective,
        basis=recommendation.basis,
        chosen=recommendation.chosen,
        savings=explanation.savings(recommendation.chosen, recommendation.candidates),
        interval_scale=None if answer is None else answer.model.interval_scale,
        run_ids=() if answer is None else answer.evidence.run_ids,
        prices={cluster.instance_type: cluster.price.model_dump() for cluster in data.spec.cluster},
        body=recommendation.model_dump_json(exclude=set(_WITHOUT_IDENTITY)),
        decision=decision,
    )


def _rendered(analysis: Analysis, decision: PlanDecision | None) -> dict[str, object]:
    if not isinstance(analysis, Answer):
        return explanation.infeasible_fields(analysis)
    data = analysis.data
    error = data.cross_validated_error if data.cross_validated_runs == analysis.evidence.run_ids else None
    if decision is not None and decision.cross_validated_error is not None:
        error = decision.cross_validated_error
    return explanation.recommendation_fields(analysis, error)


def answer_what_if(data: JobData, job_id: str, question: WhatIf) -> str:
    """Return the JSON of the `wire.Predictions` for all configurations in the question.

    Raises InvalidInput if no configuration matches the question, and ObservationError if nothing can be predicted.
    """
    answer = analyse(replace(data, spec=_specification_at(data.spec, question)))
    if not isinstance(answer, Answer):
        raise ObservationError(answer.reason)
    asked = answer.what_if(_select_configurations(answer, question))
    return wire.Predictions(
        job_id=job_id,
        basis=asked.model.basis,
        candidates=explanation.render_candidates(asked, asked.estimates),
        model=explanation.model_report(asked),
    ).model_dump_json()


def predict_run(data: JobData, configuration: Configuration) -> Estimate | None:
    """Return the estimate for a new run, or None if nothing can be predicted."""
    answer = analyse(data)
    return answer.estimate([configuration])[0] if isinstance(answer, Answer) else None


def _specification_at(spec: wire.JobSpec, question: WhatIf) -> wire.JobSpec:
    """Return the specification with the question's price and deadline."""
    changed: dict[str, object] = {}
    if question.deadline_s is not None:
        changed["limits"] = spec.limits.model_copy(update={"deadline_s": question.deadline_s})
    if question.usd_per_node_hour is not None:
        price = wire.Price(usd_per_node_hour=question.usd_per_node_hour)
        changed["cluster"] = [cluster.model_copy(update={"price": price}) for cluster in spec.cluster]
    return spec.model_copy(update=changed)


def _select_configurations(answer: Answer, question: WhatIf) -> tuple[Configuration, ...]:
    """Return all configurations that match the question, sorted. Raises InvalidInput if there are none or too many."""
    spec, size = answer.data.spec, answer.data.spec.dataset.size
    _check(spec, question)
    chosen = answer.choice.chosen
    recommended = spec.base_options if chosen is None else chosen.configuration.options
    options = _select_options(spec, question, recommended)
    configurations: set[Configuration] = set()
    for cluster in spec.cluster:
        if question.instance_type and cluster.instance_type not in question.instance_type:
            continue
        candidates = [c for c in answer.evidence.candidates if c.variant == (cluster.instance_type, options)]
        for nodes in question.num_nodes or sorted({c.num_nodes for c in candidates}):
            configurations |= _on_cluster(cluster, nodes, spec.batch.grad_accum_steps, candidates, question, options)
            if len(configurations) > MOST_CONFIGURATIONS:
                raise InvalidInput(
                    f"This request has more than {MOST_CONFIGURATIONS} configurations: use fewer values.",
                    field="num_nodes",
                )
    fitting = {c for c in configurations if c.global_batch_size <= size}
    if not configurations:
        ranks = {cluster.ranks_per_node for cluster in spec.cluster}
        worlds = sorted({nodes * number for nodes in question.num_nodes or (1,) for number in ranks})
        most = max(cluster.max_nodes for cluster in spec.cluster)
        beyond = f" The job has at most {most} nodes." if max(question.num_nodes, default=0) > most else ""
        raise InvalidInput(
            "No configuration has this global batch: it must be a multiple of the number of ranks "
            f"({', '.join(map(str, worlds))}).{beyond}",
            field="global_batch_size",
        )
    if not fitting or (fitting != configurations and question.num_nodes and question.local_batch_size):
        largest = max(c.global_batch_size for c in configurations)
        raise _too_large(largest, size, "local_batch_size" if question.local_batch_size else "num_nodes")
    return tuple(sorted(fitting))


def _check(spec: wire.JobSpec, question: WhatIf) -> None:
    """Raise InvalidInput for values that contradict each other or the job."""
    largest = max(question.global_batch_size, default=0)
    if largest and question.local_batch_size:
        raise InvalidInput(
            "global_batch_size and local_batch_size are mutually exclusive: use only one of them.",
            field="local_batch_size",
        )
    if largest > spec.dataset.size:
        raise _too_large(largest, spec.dataset.size, "global_batch_size")
    types = [cluster.instance_type for cluster in spec.cluster]
    for name in question.instance_type:
        if name not in types:
            raise InvalidInput(
                f"Instance type {name!r} is not in this job's cluster: use {' or '.join(types)}.", field="instance_type"
            )


def _select_options(spec: wire.JobSpec, question: WhatIf, recommended: Options) -> Options:
    """Return the question's options or, by default, the recommended ones. Raises InvalidInput if one is invalid."""
    asked = {}
    for text in question.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"{text!r} is not a valid option: write it as name=value.", field="option")
        asked[name] = value
    try:
        return complete(spec.options, tuple((dict(recommended) | asked).items()))
    except ValueError as error:
        raise InvalidInput(str(error), field="option") from error


def _on_cluster(
    cluster: wire.ClusterSpec,
    nodes: int,
    held: int | None,
    candidates: Sequence[Configuration],
    question: WhatIf,
    options: Options,
) -> set[Configuration]:
    """Return the configurations that match the question on `nodes` nodes of one instance type.

    The result contains the matching candidates, and configurations with the batches given in the question. `held` is
    the number of micro-steps per step if the job's script fixes it.
    """
    world, totals = nodes * cluster.ranks_per_node * (held or 1), question.global_batch_size
    batches = question.local_batch_size or [total // world for total in totals if total % world == 0]
    if question.num_nodes and not (totals or batches):
        batches = [c.local_batch_size for c in candidates if c.grad_accum_steps == (held or 1)]
    asked = [c for c in candidates if c.num_nodes == nodes and not question.local_batch_size]
    matching = {c for c in asked if not totals or c.global_batch_size in totals}
    return matching | {
        Configuration(
            num_nodes=nodes,
            ranks_per_node=cluster.ranks_per_node,
            local_batch_size=batch,
            grad_accum_steps=held or 1,
            instance_type=cluster.instance_type,
            options=options,
        )
        for batch in batches
        if batch >= 1
    }


def _too_large(total: int, size: int, field: str) -> InvalidInput:
    return InvalidInput(
        f"A global batch of {total} exceeds the data set of {size} examples, so an epoch would have no complete step: "
        f"use a smaller {field}.",
        field=field,
    )
