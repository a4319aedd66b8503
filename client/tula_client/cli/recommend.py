"""`tula recommend`: the recommended configuration, its predictions and the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tula_client._client import Client
from tula_client.cli.output import JobName, Json, emit, estimate, facts, table
from tula_client.tables import roles
from tula_wire import Candidate, Configuration, Objective, Recommendation
from tula_wire.format import configuration, count, duration, money, percent, size

BASIS = {
    "prior": "hardware data only; nothing is measured for this job yet",
    "transfer": "measurements of similar jobs; nothing is measured for this job yet",
    "probed": "measurements of this job on one node and a probe of the network",
    "profiled": "measurements of this job",
}

COLUMNS = (">nodes", ">ranks", ">local", ">global", ">step time (90 %)", ">epoch", ">training", ">cost", ">memory", "")


def recommend(
    job: JobName,
    objective: Annotated[Objective | None, typer.Option(help="Objective, instead of the job's.")] = None,
    candidates: Annotated[bool, typer.Option("--candidates", help="Print all candidates too.")] = False,
    as_json: Json = False,
) -> None:
    """Print the recommended configuration with its predictions and the reason."""
    with Client() as client:
        answer = client.handle(job).recommendation(objective)
    emit(answer, recommendation_view(answer, candidates=candidates), as_json)


def predict(
    job: JobName,
    nodes: Annotated[list[int], typer.Option(min=1, help="Number of nodes; give it again for more.")] = [],  # noqa: B006 - typer copies
    batch: Annotated[list[int], typer.Option(min=1, help="Global batch; give it again for more.")] = [],  # noqa: B006
    instance_type: Annotated[list[str], typer.Option("--type", help="Instance type of the job.")] = [],  # noqa: B006
    usd_per_node_hour: Annotated[float | None, typer.Option("--price", help="US dollars per node-hour.")] = None,
    deadline_s: Annotated[float | None, typer.Option("--deadline", help="Seconds the training may take.")] = None,
    as_json: Json = False,
) -> None:
    """Predict all combinations of the values given; a value that is left out stands for all that the job allows."""
    with Client() as client:
        answer = client.handle(job).predict(
            nodes,
            batch,
            instance_type=instance_type,
            usd_per_node_hour=usd_per_node_hour,
            deadline_s=deadline_s,
        )
    notes = [Text(f"Note: {warning}", style="yellow") for warning in answer.model.warnings]
    basis = Text(f"Based on {BASIS[answer.basis]}; intervals are 90 % prediction intervals.", style="dim")
    emit(answer, Group(_table(answer.candidates, _state), basis, *notes), as_json)


def recommendation_view(answer: Recommendation, *, candidates: bool = False) -> RenderableType:
    """A recommendation for the terminal, with the table of all candidates on request."""
    lines: list[RenderableType] = []
    if candidates:
        lines += [candidates_table(answer), Text()]
    if answer.chosen is None:
        lines.append(Text("No configuration can be recommended.", style="bold"))
    else:
        chosen = configuration(answer.chosen.configuration) + (", spot" if answer.chosen.spot else "")
        lines.append(Text.assemble(("Recommended: ", "bold"), chosen))
        lines.append(Padding(_predictions(answer.chosen), (0, 0, 0, 2), expand=False))
    lines.append(Text(answer.why))
    others = [("least time", answer.least_time), ("least cost", answer.least_cost), ("runner-up", answer.runner_up)]
    recommended = answer.chosen.configuration if answer.chosen else None
    named: dict[tuple[Configuration, bool], tuple[list[str], Candidate]] = {}
    for name, one in others:
        if one is not None and one.configuration != recommended:
            named.setdefault((one.configuration, one.spot), ([], one))[0].append(name)
    rows = [
        [
            ", ".join(names),
            configuration(one.configuration) + (", spot" if one.spot else ""),
            duration(one.total_time_s.value),
            _cost(one),
        ]
        for names, one in named.values()
    ]
    if rows:
        lines += [Text(), table(["", "instead", ">time", ">cost"], rows)]
    knee = answer.knee
    reason = knee.reason[:1].upper() + knee.reason[1:]
    where = f"Knee: {configuration(knee.configuration)}. " if knee.found and knee.configuration else ""
    lines += [Text(), Text(where + reason)]
    if answer.max_sensible_batch_size is not None:
        lines.append(
            Text(
                f"Largest sensible batch, by gradient noise: {answer.max_sensible_batch_size}; a larger batch "
                "hardly improves a step."
            )
        )
    basis = f"Based on {BASIS[answer.basis]}"
    if answer.basis in ("probed", "profiled"):
        error = answer.model.cross_validated_error
        checked = f", cross-validated error {percent(error)}" if error is not None else ""
        basis += f" ({answer.model.num_runs} runs, {answer.model.num_samples} samples{checked})"
    lines.append(Text(f"{basis}; intervals are 90 % prediction intervals.", style="dim"))
    lines += [Text(f"Note: {warning}", style="yellow") for warning in answer.model.warnings]
    return Group(*lines)


def candidates_table(answer: Recommendation) -> RenderableType:
    """All candidates with intervals and marks; with the instance type if the job has several."""

    def marks(one: Candidate) -> dict[str, bool]:
        named = roles(one, answer)
        named = {"recommended": named.pop("chosen"), **named}
        return {name.replace("_", " "): holds for name, holds in named.items()} | _state(one)

    return _table(answer.candidates, marks)


def _table(candidates: Sequence[Candidate], marks: Callable[[Candidate], dict[str, bool]]) -> RenderableType:
    several = len({one.configuration.instance_type for one in candidates}) > 1
    rows = []
    for one in candidates:
        chosen = one.configuration
        rows.append(
            [
                *([chosen.instance_type] if several else []),
                str(chosen.num_nodes),
                str(chosen.world_size),
                str(chosen.local_batch_size),
                str(chosen.global_batch_size),
                estimate(one.step_time_s),
                duration(one.epoch_time_s.value),
                duration(one.total_time_s.value),
                _cost(one),
                size(one.memory_bytes.value if one.memory_bytes else None),
                ", ".join(name for name, holds in marks(one).items() if holds),
            ]
        )
    return table([*(["=type"] if several else []), *COLUMNS], rows)


def _predictions(one: Candidate) -> RenderableType:
    rows = [
        ["step", estimate(one.step_time_s)],
        ["epoch", estimate(one.epoch_time_s)],
        ["training", estimate(one.total_time_s)],
    ]
    if one.cost_usd is not None:
        rows.append(["cost", estimate(one.cost_usd, "usd")])
    if one.tokens_per_step is not None:
        rows.append(["tokens", f"{count(one.tokens_per_step)} a step"])
        rows.append(["", f"{estimate(one.tokens_per_s, 'count')} a second"])
        if one.usd_per_million_tokens is not None:
            rows.append(["", f"{estimate(one.usd_per_million_tokens, 'usd')} a million"])
    if one.memory_bytes is not None:
        fits = f", fits with probability {one.memory_fits:.2f}" if one.memory_fits is not None else ""
        rows.append(["memory", estimate(one.memory_bytes, "bytes") + fits])
    if one.extrapolated:
        rows.append(["", "extrapolated: outside the measured range"])
    return facts(rows)


def _cost(one: Candidate) -> str:
    return money(one.cost_usd.value if one.cost_usd else None)


def _state(one: Candidate) -> dict[str, bool]:
    return {
        "spot": one.spot,
        "measured": one.profiled,
        "extrapolated": one.extrapolated,
        f"excluded: {one.excluded_by}": one.excluded_by is not None,
    }
