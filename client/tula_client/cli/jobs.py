"""Defines commands that show and change a job and its runs, events, recommendation and gradient scaling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from tula_client._client import Client
from tula_client._errors import TulaError, UsageError
from tula_client._flows import roles
from tula_client._schedule import Target, write_schedule
from tula_client._spec import load_spec
from tula_client.cli.output import (
    BRIEF,
    JobName,
    Json,
    Narrowing,
    brief,
    emit,
    escaped,
    estimate,
    facts,
    saving,
    seconds,
    table,
)
from tula_client.launch.registration import register
from tula_client.launch.reporter import rest_of_plan
from tula_wire import (
    JOBS_COUNTED,
    BatchSchedule,
    Candidate,
    Estimate,
    Event,
    Job,
    JobPage,
    JobPatch,
    JobState,
    Ledger,
    LedgerEntry,
    Objective,
    Predictions,
    Recommendation,
    Run,
    ScalingPatch,
    ScalingPolicy,
    ScalingThresholds,
)
from tula_wire.format import (
    NOTHING,
    cluster_name,
    configuration,
    count,
    duration,
    energy,
    mass,
    money,
    multiple,
    option,
    percent,
    size,
)
from tula_wire.text import printable

BASIS = {
    "prior": "hardware data only; this job has no measurements yet",
    "transfer": "measurements of similar jobs; this job has no measurements yet",
    "probed": "measurements of this job on one node and a probe of the network",
    "profiled": "measurements of this job",
}

COLUMNS = (">nodes", ">ranks", ">local", ">global", ">step time (90 %)", ">epoch", ">training", ">cost", ">memory", "")
Policy = Annotated[ScalingPolicy, typer.Option(help="Gradient-scaling policy to which the values belong.")]
SETTINGS = ("delta", "small_batch_size", "static_scale", "s_min", "s_max")


def add(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The job's specification.")], as_json: Json = False
) -> None:
    """Register a job without running it, and print its recommendation; the same file always refers to the same job."""
    described = load_spec(spec)
    with Client() as client:
        registered = register(client, described)
        answer = client.recommendation(registered.job.id)
    for text in registered.notes:
        print(printable(text), file=sys.stderr)
    title = Text.assemble((registered.job.name, "bold"), f"  {registered.job.id}")
    emit(answer, Group(title, recommendation_view(answer)), as_json)


def list_(
    search: Annotated[str | None, typer.Option(help="List only jobs whose name contains this text.")] = None,
    state: Annotated[JobState | None, typer.Option(help="List only jobs in this state.")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Include archived jobs.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Maximum number of jobs to list.")] = 20,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with Client() as client:
        page = client.jobs(search=search, state=state, archived=archived, limit=limit)
    emit(page, list_view(page), as_json)


def show(job: JobName, as_json: Json = False) -> None:
    """Show a job's plan, runs and recommendation, and compare predictions with measurements."""
    with Client() as client:
        handle = client.handle(job)
        registered, done, ledger = handle.status(), handle.runs(), client.ledger(handle.id)
    body = {**registered.model_dump(mode="json"), "runs": done, "ledger": ledger.entries}
    emit(body, job_view(registered, done, ledger), as_json)


def runs(job: JobName, as_json: Json = False) -> None:
    """List the runs of a job, newest first, with measured and predicted step times."""
    with Client() as client:
        listed = client.handle(job).runs()
    emit(
        listed,
        _runs_view(listed) if listed else "The job has no runs. Start them with tula tune SPEC.toml -- COMMAND.",
        as_json,
    )


def edit(
    job: JobName,
    objective: Annotated[Objective | None, typer.Option(help="New objective of the job.")] = None,
    deadline_s: Annotated[
        float | None,
        typer.Option("--deadline", parser=seconds, help="Maximum training time in seconds; 0 for no limit."),
    ] = None,
    budget_usd: Annotated[
        float | None, typer.Option("--budget", min=0, help="Maximum training cost in US dollars; 0 for no limit.")
    ] = None,
    price: Annotated[
        list[str],
        typer.Option(metavar="USD|TYPE=USD", help="Price of an instance type in US dollars per node-hour; repeatable."),
    ] = [],  # noqa: B006 - typer copies
    as_json: Json = False,
) -> None:
    """Change a job's objective, limits and prices without losing measurements, and print the new recommendation."""
    with Client() as client:
        handle = client.handle(job)
        registered = handle.status()
        changed = {"deadline_s": deadline_s, "budget_usd": budget_usd}
        given = {name: value or None for name, value in changed.items() if value is not None}
        patch: dict[str, Any] = {"objective": objective} if objective is not None else {}
        if given:
            patch["limits"] = registered.spec.limits.model_dump() | given
        if price:
            patch["prices"] = dict(_price(word, registered) for word in price)
        if not patch:
            raise UsageError("there is nothing to change: give --objective, --deadline, --budget or --price")
        client.patch_job(registered.id, JobPatch.model_validate(patch))
        answer = handle.recommendation()
    emit(answer, recommendation_view(answer), as_json)


def _price(word: str, job: Job) -> tuple[str, dict[str, Any]]:
    """Return the instance type that `word` names, by default the job's only type, and the type's new price."""
    name, equals, usd = word.rpartition("=")
    prices = {cluster.instance_type: cluster.price for cluster in job.spec.cluster}
    if not equals and len(prices) == 1:
        (name,) = prices
    if name not in prices:
        raise UsageError(f"--price: {word!r} must have the form TYPE=USD, where TYPE is one of {', '.join(prices)}")
    try:
        return name, prices[name].model_dump() | {"usd_per_node_hour": float(usd)}
    except ValueError:
        raise UsageError(f"--price: {usd!r} is not a number: give the price in US dollars per node-hour") from None


def archive(job: JobName, as_json: Json = False) -> None:
    """Archive a job, which hides it from lists but keeps its measurements."""
    with Client() as client:
        archived = client.archive_job(client.handle(job).id)
    emit(archived, f"Archived {archived.name} ({archived.id}).", as_json)


def delete(
    job: JobName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a job and its measurements; this cannot be undone."""
    with Client() as client:
        registered = client.handle(job).status()
        if not yes:
            if as_json:
                raise UsageError("--json cannot ask for confirmation: add --yes to delete the job")
            question = printable(f"Delete {registered.name} ({registered.id}) and its measurements?")
            if not typer.confirm(question, err=True):
                raise typer.Exit(1)
        client.delete_job(registered.id)
    emit({"deleted": registered.id}, f"Deleted {registered.name} ({registered.id}).", as_json)


def watch(job: JobName, as_json: Json = False) -> None:
    """Print one line for each past and future event of a job, until Ctrl-C; --json prints complete events."""
    with Client() as client:
        for event in client.events(client.handle(job).id, last_id=0):
            print(escaped(event.model_dump_json()) if as_json else printable(event_line(event)), flush=True)


def open_(job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job's id, or its name.")] = None) -> None:
    """Open the dashboard or a job's page in a browser, and print the page's address."""
    with Client() as client:
        page = client.url + ("/" if job is None else f"/jobs/{client.handle(job).id}")
    print(page)
    typer.launch(page)


def event_line(event: Event) -> str:
    """Return a one-line description of an event."""
    data, run = event.data, f" {event.run_id}" if event.run_id else ""
    text = next((str(data[name]) for name in ("sentence", "message", "plan_reason", "purpose") if data.get(name)), "")
    state = str(data.get("state", "")).replace("_", " ")
    if not text and not state:
        plain = {name: value for name, value in data.items() if isinstance(value, (str, int, float))}
        text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items()) or "changed"
    return f"{event.at.astimezone():%H:%M:%S} {event.kind}{run}: {': '.join(part for part in (state, text) if part)}"


def job_view(job: Job, runs: list[Run], ledger: Ledger | None = None) -> RenderableType:
    """Return a view of a job, its runs, and the predicted and measured step times of its training runs."""
    failed = sum(run.kind == "profile" and run.state in ("failed", "out_of_memory") for run in job.plan)
    suffix = f", {failed} of them failed" if failed else ""
    rows = [
        ["model", job.model_name],
        ["state", f"{job.state}, {job.runs_done} of {job.runs_planned} profiling runs done{suffix}"],
        *([["plan", rest_of_plan(job.profiling_cost)]] if job.profiling_cost.launches_left else []),
        ["objective", job.objective],
        ["recommended", configuration(job.recommended)],
    ]
    if job.predicted_time_s is not None:
        rows.append(["training", f"{duration(job.predicted_time_s)}, {money(job.predicted_cost_usd)}"])
    if job.saving_vs_smallest_batch is not None and job.saving_vs_largest_batch is not None:
        small, large = saving(job.saving_vs_smallest_batch), saving(job.saving_vs_largest_batch)
        rows.append(["compared", f"{small} the smallest batch, {large} the largest batch, on the same number of nodes"])
    if job.prediction_error is not None:
        rows.append(["measured", f"{percent(job.prediction_error, signed=True)} relative to the prediction"])
    title = Text.assemble((job.name, "bold"), f"  {job.id}")
    parts: list[RenderableType] = [title, facts(rows), Text(job.plan_reason, style="dim")]
    if runs:
        parts += [Text(), _runs_view(runs)]
    kept = [entry for entry in ledger.entries if entry.run_id is not None] if ledger is not None else []
    if kept:
        parts += [Text(), _predictions_view(kept)]
    return Group(*parts)


def _runs_view(runs: list[Run]) -> RenderableType:
    rows = [
        [
            run.id,
            run.state.replace("_", " "),
            brief(run.configuration),
            duration(run.step_time_s),
            duration(run.predicted_step_time_s),
            _prediction_error(run),
            (run.method or "train") if run.kind == "train" else "profile",
        ]
        for run in runs
    ]
    heads = ["run", "=state", f"={BRIEF}", ">step time", ">predicted", ">error", "=kind"]
    # Sentences are printed below the table, since a narrow column would wrap them after every word.
    notes = [(run.id, run.message or (run.purpose if run.kind == "profile" else "")) for run in runs]
    listed = Narrowing(heads, rows, ("=kind", ">predicted", ">error"))
    return Group(
        listed,
        *(Text(f"{run}  {note}", style="dim") for run, note in notes if note),
    )


def _prediction_error(run: Run) -> str:
    if not run.step_time_s or not run.predicted_step_time_s:
        return "-"
    return percent(run.step_time_s / run.predicted_step_time_s - 1, signed=True)


def _predictions_view(entries: list[LedgerEntry]) -> RenderableType:
    inside = {True: "yes", False: "no", None: "-"}
    rows = [
        [
            entry.recommendation_id,
            entry.run_id or "-",
            f"{entry.objective}, {entry.basis}",
            estimate(entry.predicted_step_time_s),
            duration(entry.measured_step_time_s),
            percent(entry.error, signed=True),
            inside[entry.within_interval],
        ]
        for entry in entries
    ]
    return table(["recommended", "training", "for", ">predicted", ">measured", ">error", "inside"], rows)


def list_view(page: JobPage) -> RenderableType:
    if not page.jobs:
        return Text("There are no jobs. Register one with tula jobs add SPEC.toml or tula tune SPEC.toml -- COMMAND.")
    rows = [
        [
            job.id,
            job.name,
            job.state,
            f"{job.runs_done}/{job.runs_planned}",
            brief(job.recommended),
            duration(job.predicted_time_s),
            money(job.predicted_cost_usd),
        ]
        for job in page.jobs
    ]
    heads = ["id", "name", "=state", ">runs", f"={BRIEF}", ">training", ">cost"]
    listed = Narrowing(heads, rows, (">runs", "=state"))
    if page.next_cursor is None:
        return listed
    total = f"{page.total}{'+' if page.total >= JOBS_COUNTED else ''}"
    rest = f"{len(page.jobs)} of {total} jobs are listed: use --limit (at most 500) or --search"
    return Group(listed, Text(rest, style="dim"))


def recommend(
    job: JobName,
    objective: Annotated[Objective | None, typer.Option(help="Objective to use instead of the job's.")] = None,
    candidates: Annotated[bool, typer.Option("--candidates", help="Also print all candidates.")] = False,
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule", help="Instead, print a schedule in which the batch grows, and its expected savings."
        ),
    ] = False,
    target: Annotated[
        Target | None, typer.Option("--for", help="With --schedule: print only the schedule, in this program's format.")
    ] = None,
    beta2: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="With --schedule: Adam's beta2 at the base batch (default: 0.999)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the recommended configuration with its predictions and the reason."""
    if not schedule:
        if target is not None or beta2 is not None:
            raise UsageError("--for and --beta2 apply only to a batch schedule: add --schedule")
        with Client() as client:
            answer = client.handle(job).recommendation(objective)
        emit(answer, recommendation_view(answer, candidates=candidates), as_json)
        return
    if candidates:
        raise UsageError("--candidates and --schedule are mutually exclusive: use only one")
    if target is not None and as_json:
        raise UsageError("--for and --json are mutually exclusive: use only one")
    with Client() as client:
        planned = client.handle(job).schedule(objective, **({} if beta2 is None else {"beta2": beta2}))
    if target is None:
        emit(planned, schedule_view(planned), as_json)
    elif not planned.stages:
        raise TulaError(planned.sentence)
    else:
        print(write_schedule(planned, target).rstrip())


def predict(
    job: JobName,
    nodes: Annotated[list[int], typer.Option(min=1, help="Number of nodes; repeat for several.")] = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="Global batch size; repeat for several.")] = [],  # noqa: B006
    instance_type: Annotated[
        list[str], typer.Option("--type", help="Instance type of the job; repeat for several.")
    ] = [],  # noqa: B006
    option: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="Value of an option (default: as recommended); repeatable.")
    ] = [],  # noqa: B006
    usd_per_node_hour: Annotated[
        float | None, typer.Option("--price", help="Price in US dollars per node-hour.")
    ] = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", parser=seconds, help="Maximum training time in seconds.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict all combinations of the given values; an omitted option means all values that the job allows."""
    with Client() as client:
        answer = client.handle(job).predict(
            nodes,
            batch,
            instance_type=instance_type,
            option=option,
            usd_per_node_hour=usd_per_node_hour,
            deadline_s=deadline_s,
        )
    emit(answer, Group(_table(answer.candidates, _state), *_basis(answer)), as_json)


def recommendation_view(answer: Recommendation, *, candidates: bool = False) -> RenderableType:
    """Return a view of a recommendation for the terminal; with `candidates`, include the table of all candidates."""
    lines: list[RenderableType] = []
    if candidates:
        lines += [candidates_table(answer), Text()]
    if len(answer.menu) > 1:
        lines += [menu_table(answer), Text()]
    if answer.chosen is None:
        lines.append(Text("No configuration can be recommended.", style="bold"))
    else:
        chosen = configuration(answer.chosen.configuration) + (", spot" if answer.chosen.spot else "")
        title, quality = Text.assemble(("Recommended: ", "bold"), chosen), answer.quality
        if quality is None:
            lines.append(title)
        elif quality.kept:
            lines += [title, Text.assemble(("Quality: ", "bold"), quality.sentence)]
        else:  # a warning comes first
            lines += [Text(quality.sentence, style="bold yellow"), title]
        lines.append(Padding(_predictions(answer.chosen), (0, 0, 0, 2), expand=False))
    lines += [*today_line(answer), Text(answer.why), *(Text(effect.sentence) for effect in answer.options)]
    knee = answer.knee
    reason = knee.reason[:1].upper() + knee.reason[1:]
    where = f"Knee: {configuration(knee.configuration)}. " if knee.found and knee.configuration else ""
    lines += [Text(), Text(where + reason)]
    if answer.max_sensible_batch_size is not None:
        lines.append(
            Text(
                f"Largest sensible batch, by gradient noise: {answer.max_sensible_batch_size}; a step with a larger "
                "batch makes hardly any more progress."
            )
        )
    evidence = ""
    if answer.basis in ("probed", "profiled"):
        error = answer.model.cross_validated_error
        checked = f", cross-validated error {percent(error)}" if error is not None else ""
        evidence = f" ({answer.model.num_runs} runs, {answer.model.num_samples} samples{checked})"
    return Group(*lines, *_basis(answer, evidence))


def schedule_view(answer: BatchSchedule) -> RenderableType:
    """Return a view of a batch schedule for the terminal: stages, savings, risk, and how to train with the schedule."""
    if not answer.stages:
        return answer.sentence
    with_beta2 = any(stage.beta2 is not None for stage in answer.stages)
    rows = [
        [
            percent(stage.first_share),
            f"{stage.first_step:,}",
            brief(stage.configuration),
            f"x {multiple(stage.learning_rate_factor)}" if stage.learning_rate_factor else NOTHING,
            *([f"{stage.beta2:.4g}"] if stage.beta2 is not None else []),
            duration(stage.time_s.value),
            money(_value(stage.cost_usd)),
        ]
        for stage in answer.stages
    ]
    columns = [">from", ">step", f"={BRIEF}", ">rate", *([">beta2"] if with_beta2 else []), ">time", ">cost"]
    relaunch = (
        "Each stage is a separate launch that resumes from the previous stage's checkpoint. Each resumption is assumed "
        f"to take {duration(answer.relaunch_s)}. --for transformers and --for lightning print a callback that sets the "
        "learning rate and beta2, and stops training at the end of a stage. Rates are relative to the learning rate "
        f"for a batch of {answer.base_batch_size}. `TulaOptimizer` raises the rate gradually; without it, warm up to "
        "each rate."
    )
    megatron = f"Megatron-LM: {write_schedule(answer, 'megatron')}"
    return Group(
        table(columns, rows),
        Text(answer.sentence),
        Text(answer.risk or "", style="yellow"),
        Text(relaunch),
        Text(megatron, no_wrap=True, overflow="ignore"),
    )


def today_line(answer: Recommendation) -> list[Text]:
    """Return a list of one line, which compares the recommended configuration with the script's current options.

    The list is empty if there is no recommended configuration or no candidate with the current options.

    For example: `4 nodes, global batch 2048, bf16, compiled: 3 h 6 min, $152.00; as you run it today: 7 h 54 min,
    $388.00.` The part after the semicolon is omitted if the script already has the recommended options.
    """
    chosen, today = answer.chosen, answer.with_base_options
    if chosen is None or today is None:
        return []
    configured = chosen.configuration
    words = [cluster_name(configured), f"global batch {configured.global_batch_size}"]
    words += [option(name, word) for name, word in configured.options]
    compared = "" if configured.options == today.configuration.options else f"; as you run it today: {_totals(today)}"
    return [Text(f"{', '.join(words)}: {_totals(chosen)}{compared}.")]


def _totals(candidate: Candidate) -> str:
    return ", ".join([duration(candidate.total_time_s.value), *([_cost(candidate)] if candidate.cost_usd else [])])


def menu_table(answer: Recommendation) -> RenderableType:
    """Return a table of the configurations to choose from, fastest first, with the price of each hour saved.

    `*` marks the recommended configuration. The energy, its price and its CO2 are included if they are predicted.
    """
    points = answer.menu
    columns = {
        "to choose among": [
            ("* " if point.recommended else "") + configuration(point.configuration) + (", spot" if point.spot else "")
            for point in points
        ],
        ">time": [duration(point.total_time_s.value) for point in points],
        ">cost": [money(_value(point.cost_usd)) for point in points],
        ">cost per hour saved": [money(point.usd_per_hour_saved) for point in points],
    }
    if any(point.energy_kwh for point in points):
        columns[">energy"] = [energy(_value(point.energy_kwh)) for point in points]
    if any(point.energy_usd for point in points):
        columns[">its price"] = [money(_value(point.energy_usd)) for point in points]
    if any(point.energy_gco2 for point in points):
        columns[">its CO2"] = [mass(_value(point.energy_gco2)) for point in points]
    rows = list(zip(*columns.values(), strict=True))
    return Narrowing([*columns], rows, [name for name in (">its CO2", ">its price", ">energy") if name in columns])


def _value(predicted: Estimate | None) -> float | None:
    return None if predicted is None else predicted.value


def _basis(answer: Recommendation | Predictions, evidence: str = "") -> list[Text]:
    """Return lines that state the basis of the predictions and the warnings about them."""
    basis = Text(f"Based on {BASIS[answer.basis]}{evidence}; intervals are 90 % prediction intervals.", style="dim")
    return [basis, *(Text(f"Note: {warning}", style="yellow") for warning in answer.model.warnings)]


def candidates_table(answer: Recommendation) -> RenderableType:
    """Return a table of all candidates with intervals and marks, and with instance types if there are several."""

    def marks(candidate: Candidate) -> dict[str, bool]:
        named = roles(candidate, answer)
        named = {"recommended": named.pop("chosen"), **named}
        return {name.replace("_", " "): holds for name, holds in named.items()} | _state(candidate)

    return _table(answer.candidates, marks)


def _table(candidates: Sequence[Candidate], marks: Callable[[Candidate], dict[str, bool]]) -> RenderableType:
    several = len({candidate.configuration.instance_type for candidate in candidates}) > 1
    has_options = any(candidate.configuration.options for candidate in candidates)
    rows = []
    for candidate in candidates:
        chosen, held = candidate.configuration, marks(candidate)
        rows.append(
            [
                *([chosen.instance_type] if several else []),
                ("* " if held.get("recommended") else "") + str(chosen.num_nodes),
                str(chosen.world_size),
                str(chosen.local_batch_size),
                str(chosen.global_batch_size),
                *([", ".join(starmap(option, chosen.options))] if has_options else []),
                estimate(candidate.step_time_s),
                duration(candidate.epoch_time_s.value),
                duration(candidate.total_time_s.value),
                _cost(candidate),
                size(candidate.memory_bytes.value if candidate.memory_bytes else None),
                ", ".join(name for name, holds in held.items() if holds),
            ]
        )
    columns = [*(["=type"] if several else []), *COLUMNS]
    if has_options:
        columns.insert(columns.index(">step time (90 %)"), "options")
    return Narrowing(columns, rows, (">ranks", ">epoch", ">memory", ">local"))


def _predictions(candidate: Candidate) -> RenderableType:
    rows = [
        ["step", estimate(candidate.step_time_s)],
        ["epoch", estimate(candidate.epoch_time_s)],
        ["training", estimate(candidate.total_time_s)],
    ]
    if candidate.cost_usd is not None:
        rows.append(["cost", estimate(candidate.cost_usd, "usd")])
    if candidate.energy_kwh is not None:
        rows.append(["energy", estimate(candidate.energy_kwh, "kwh")])
        if candidate.energy_usd is not None:
            rows.append(["", estimate(candidate.energy_usd, "usd")])
        if candidate.energy_gco2 is not None:
            rows.append(["CO2", estimate(candidate.energy_gco2, "gco2")])
    if candidate.tokens_per_step is not None:
        rows.append(["tokens", f"{count(candidate.tokens_per_step)} a step"])
        rows.append(["", f"{estimate(candidate.tokens_per_s, 'count')} a second"])
        if candidate.usd_per_million_tokens is not None:
            rows.append(["", f"{estimate(candidate.usd_per_million_tokens, 'usd')} a million"])
    if candidate.memory_bytes is not None:
        fits = f", fits with probability {candidate.memory_fits:.2f}" if candidate.memory_fits is not None else ""
        rows.append(["memory", estimate(candidate.memory_bytes, "bytes") + fits])
    if candidate.extrapolated:
        rows.append(["", "extrapolated: outside the measured range"])
    return facts(rows)


def _cost(candidate: Candidate) -> str:
    return money(candidate.cost_usd.value if candidate.cost_usd else None)


def _state(candidate: Candidate) -> dict[str, bool]:
    return {
        "spot": candidate.spot,
        "profiled": candidate.profiled,
        "extrapolated": candidate.extrapolated,
        f"excluded: {candidate.excluded_by}": candidate.excluded_by is not None,
    }


def show_scaling(job: JobName, policy: Policy = "gain", as_json: Json = False) -> None:
    """Show the gradient-scaling values that are set for a policy; the script decides all other values."""
    with Client() as client:
        thresholds = client.scaling(client.handle(job).id, policy=policy).thresholds
    assert thresholds is not None  # the service returns None only for a request with an ETag
    emit(thresholds, facts(_thresholds(thresholds)), as_json)


def set_scaling(
    job: JobName,
    values: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help=f"Any of {', '.join(SETTINGS)}.")],
    policy: Policy = "gain",
    as_json: Json = False,
) -> None:
    """Set gradient-scaling values of a policy; NAME=null lets the script decide that value again."""
    patch = ScalingPatch.model_validate(dict(map(_pair, values)))
    with Client() as client:
        stored = client.patch_scaling(client.handle(job).id, patch, policy=policy)
    emit(stored, facts(_thresholds(stored)), as_json)


def _pair(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or name not in SETTINGS:
        raise UsageError(f"{word!r} is not a setting: give NAME=VALUE, where NAME is one of {', '.join(SETTINGS)}")
    return name, None if value == "null" else value


def _thresholds(thresholds: ScalingThresholds) -> list[list[str]]:
    return [
        ["policy", thresholds.policy],
        *([name.replace("_", " "), _setting(getattr(thresholds, name))] for name in SETTINGS),
    ]


def _setting(value: float | str | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
