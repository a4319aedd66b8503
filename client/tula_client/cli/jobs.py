"""Commands that show and change a job at the service: its runs and events, its recommendation, its scaling."""

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
    "prior": "hardware data only; nothing is measured for this job yet",
    "transfer": "measurements of similar jobs; nothing is measured for this job yet",
    "probed": "measurements of this job on one node and a probe of the network",
    "profiled": "measurements of this job",
}

COLUMNS = (">nodes", ">ranks", ">local", ">global", ">step time (90 %)", ">epoch", ">training", ">cost", ">memory", "")
Policy = Annotated[ScalingPolicy, typer.Option(help="Policy that the numbers belong to.")]
SETTINGS = ("delta", "small_batch_size", "static_scale", "s_min", "s_max")


def add(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The job's specification.")], as_json: Json = False
) -> None:
    """Register a job without running it and print its recommendation; the same file finds the same job."""
    described = load_spec(spec)
    with Client() as client:
        registered = register(client, described)
        answer = client.recommendation(registered.job.id)
    for text in registered.notes:
        print(printable(text), file=sys.stderr)
    title = Text.assemble((registered.job.name, "bold"), f"  {registered.job.id}")
    emit(answer, Group(title, recommendation_view(answer)), as_json)


def list_(
    search: Annotated[str | None, typer.Option(help="Only jobs whose name contains this text.")] = None,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Include archived jobs.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Largest number of jobs.")] = 20,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with Client() as client:
        page = client.jobs(search=search, state=state, archived=archived, limit=limit)
    emit(page, list_view(page), as_json)


def show(job: JobName, as_json: Json = False) -> None:
    """Show a job with its plan, its runs, its recommendation, and predictions with measurements."""
    with Client() as client:
        handle = client.handle(job)
        registered, done, ledger = handle.status(), handle.runs(), client.ledger(handle.id)
    body = {**registered.model_dump(mode="json"), "runs": done, "ledger": ledger.entries}
    emit(body, job_view(registered, done, ledger), as_json)


def runs(job: JobName, as_json: Json = False) -> None:
    """List the runs of a job, newest first, with measured and predicted step times."""
    with Client() as client:
        listed = client.handle(job).runs()
    emit(listed, _runs_view(listed) if listed else "No runs. Start them with tula tune SPEC.toml -- COMMAND.", as_json)


def edit(
    job: JobName,
    objective: Annotated[Objective | None, typer.Option(help="What to optimize from now on.")] = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", parser=seconds, help="Seconds the training may take; 0: any.")
    ] = None,
    budget_usd: Annotated[
        float | None, typer.Option("--budget", min=0, help="US dollars the training may cost; 0: any.")
    ] = None,
    price: Annotated[
        list[str],
        typer.Option(metavar="USD|TYPE=USD", help="US dollars per node-hour, of one instance type; can be repeated."),
    ] = [],  # noqa: B006 - typer copies
    as_json: Json = False,
) -> None:
    """Change a job's objective, limits and prices, and print its recommendation; measurements are kept."""
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
            raise UsageError("nothing to change: give --objective, --deadline, --budget or --price")
        client.patch_job(registered.id, JobPatch.model_validate(patch))
        answer = handle.recommendation()
    emit(answer, recommendation_view(answer), as_json)


def _price(word: str, job: Job) -> tuple[str, dict[str, Any]]:
    """Return the instance type and its price with the new rate; by default, the only instance type."""
    name, equals, usd = word.rpartition("=")
    prices = {cluster.instance_type: cluster.price for cluster in job.spec.cluster}
    if not equals and len(prices) == 1:
        (name,) = prices
    if name not in prices:
        raise UsageError(
            f"--price: {word!r} names none of the job's instance types: give TYPE=USD of {', '.join(prices)}"
        )
    try:
        return name, prices[name].model_dump() | {"usd_per_node_hour": float(usd)}
    except ValueError:
        raise UsageError(f"--price: {usd!r} is not a number: give US dollars per node-hour") from None


def archive(job: JobName, as_json: Json = False) -> None:
    """Hide a job from lists; its measurements are kept."""
    with Client() as client:
        archived = client.archive_job(client.handle(job).id)
    emit(archived, f"Archived {archived.name} ({archived.id}).", as_json)


def delete(
    job: JobName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Delete a job with its measurements; this cannot be undone."""
    with Client() as client:
        registered = client.handle(job).status()
        if not yes:
            if as_json:
                raise UsageError("with --json nothing is asked: add --yes to delete")
            question = printable(f"Delete {registered.name} ({registered.id}) and its measurements?")
            if not typer.confirm(question, err=True):
                raise typer.Exit(1)
        client.delete_job(registered.id)
    emit({"deleted": registered.id}, f"Deleted {registered.name} ({registered.id}).", as_json)


def watch(job: JobName, as_json: Json = False) -> None:
    """Print each event of a job on one line, beginning with the first, until Ctrl-C. --json prints complete events."""
    with Client() as client:
        for event in client.events(client.handle(job).id, last_id=0):
            print(escaped(event.model_dump_json()) if as_json else printable(event_line(event)), flush=True)


def open_(job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job's id, or its name.")] = None) -> None:
    """Open the dashboard, or a job's page, in a browser, and print its address."""
    with Client() as client:
        page = client.url + ("/" if job is None else f"/jobs/{client.handle(job).id}")
    print(page)
    typer.launch(page)


def event_line(event: Event) -> str:
    """Describe an event in one line."""
    data, run = event.data, f" {event.run_id}" if event.run_id else ""
    text = next((str(data[name]) for name in ("sentence", "message", "plan_reason", "purpose") if data.get(name)), "")
    state = str(data.get("state", "")).replace("_", " ")
    if not text and not state:
        plain = {name: value for name, value in data.items() if isinstance(value, (str, int, float))}
        text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items()) or "changed"
    return f"{event.at.astimezone():%H:%M:%S} {event.kind}{run}: {': '.join(part for part in (state, text) if part)}"


def job_view(job: Job, runs: list[Run], ledger: Ledger | None = None) -> RenderableType:
    """Render a job, its runs, and the predictions for training runs with their measurements."""
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
        rows.append(["compared", f"{small} the smallest batch, {large} the largest, on as many nodes"])
    if job.prediction_error is not None:
        rows.append(["measured", f"{percent(job.prediction_error, signed=True)} against the prediction"])
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
    # Sentences go below the table, since a narrow column would break them into single words.
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
        return Text("No jobs. Register one with tula jobs add SPEC.toml, or tula tune SPEC.toml -- COMMAND.")
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
    rest = f"{len(page.jobs)} of {total} jobs: give --limit (at most 500) or --search"
    return Group(listed, Text(rest, style="dim"))


def recommend(
    job: JobName,
    objective: Annotated[Objective | None, typer.Option(help="Objective, instead of the job's.")] = None,
    candidates: Annotated[bool, typer.Option("--candidates", help="Print all candidates too.")] = False,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Print a batch that grows during the training instead, and its worth.")
    ] = False,
    target: Annotated[
        Target | None, typer.Option("--for", help="With --schedule: print it as this program takes it, and only that.")
    ] = None,
    beta2: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="With --schedule: Adam's at the base batch, else 0.999.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the recommended configuration with its predictions and the reason."""
    if not schedule:
        if target is not None or beta2 is not None:
            raise UsageError("--for and --beta2 belong to a batch schedule: add --schedule")
        with Client() as client:
            answer = client.handle(job).recommendation(objective)
        emit(answer, recommendation_view(answer, candidates=candidates), as_json)
        return
    if candidates:
        raise UsageError("--candidates belongs to the constant recommendation: leave out --schedule")
    if target is not None and as_json:
        raise UsageError("--for and --json print the schedule in two forms: leave out one of them")
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
    nodes: Annotated[list[int], typer.Option(min=1, help="Number of nodes; give it again for more.")] = [],  # noqa: B006 - typer copies
    batch: Annotated[list[int], typer.Option(min=1, help="Global batch; give it again for more.")] = [],  # noqa: B006
    instance_type: Annotated[list[str], typer.Option("--type", help="Instance type of the job.")] = [],  # noqa: B006
    option: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="Value of an option, else as recommended; can be repeated.")
    ] = [],  # noqa: B006
    usd_per_node_hour: Annotated[float | None, typer.Option("--price", help="US dollars per node-hour.")] = None,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline", parser=seconds, help="Seconds the training may take.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict all combinations of the given values; if none is given, all values that the job allows."""
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
    """Render a recommendation for the terminal, with the table of all candidates on request."""
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
                f"Largest sensible batch, by gradient noise: {answer.max_sensible_batch_size}; a larger batch "
                "hardly improves a step."
            )
        )
    evidence = ""
    if answer.basis in ("probed", "profiled"):
        error = answer.model.cross_validated_error
        checked = f", cross-validated error {percent(error)}" if error is not None else ""
        evidence = f" ({answer.model.num_runs} runs, {answer.model.num_samples} samples{checked})"
    return Group(*lines, *_basis(answer, evidence))


def schedule_view(answer: BatchSchedule) -> RenderableType:
    """Return a batch schedule for the terminal: its stages, what it saves, its risk, and how to train with it."""
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
        f"Each stage is a launch from the checkpoint of the one before, for which {duration(answer.relaunch_s)} are "
        "counted. --for transformers and --for lightning print a callback that stops there and sets rate and beta2. "
        f"Rates are over that of a batch of {answer.base_batch_size}; `TulaOptimizer` raises them step by step; by "
        "hand, warm up to each."
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
    """Return the line that compares the recommendation with the script's current options; empty if either is missing.

    For example: `4 nodes, global batch 2048, bf16, compiled: 3 h 6 min, $152.00; as you run it today: 7 h 54 min,
    $388.00.` The second half is left out if the recommended options are today's.
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
    """Return a table of the points to choose from, fastest first, with the price of each hour saved.

    `*` marks the recommended point. The table has energy, its price and its CO2 if the points have them.
    """
    points = answer.menu
    columns = {
        "to choose among": [
            ("* " if point.recommended else "") + configuration(point.configuration) + (", spot" if point.spot else "")
            for point in points
        ],
        ">time": [duration(point.total_time_s.value) for point in points],
        ">cost": [money(_value(point.cost_usd)) for point in points],
        ">an hour less costs": [money(point.usd_per_hour_saved) for point in points],
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
    """Return lines on the basis of the predictions, and on what to know before trusting them."""
    basis = Text(f"Based on {BASIS[answer.basis]}{evidence}; intervals are 90 % prediction intervals.", style="dim")
    return [basis, *(Text(f"Note: {warning}", style="yellow") for warning in answer.model.warnings)]


def candidates_table(answer: Recommendation) -> RenderableType:
    """Render all candidates with intervals and marks, and with the instance type if the job has several."""

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
    """Show the numbers that are set for a policy; the script decides all others."""
    with Client() as client:
        thresholds = client.scaling(client.handle(job).id, policy=policy).thresholds
    assert thresholds is not None  # None answers only a request with an ETag
    emit(thresholds, facts(_thresholds(thresholds)), as_json)


def set_scaling(
    job: JobName,
    values: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help=f"Any of {', '.join(SETTINGS)}.")],
    policy: Policy = "gain",
    as_json: Json = False,
) -> None:
    """Set numbers of a policy; NAME=null lets the script decide again."""
    patch = ScalingPatch.model_validate(dict(map(_pair, values)))
    with Client() as client:
        stored = client.patch_scaling(client.handle(job).id, patch, policy=policy)
    emit(stored, facts(_thresholds(stored)), as_json)


def _pair(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or name not in SETTINGS:
        raise UsageError(f"{word!r} is not a setting: give NAME=VALUE with a name of {', '.join(SETTINGS)}")
    return name, None if value == "null" else value


def _thresholds(thresholds: ScalingThresholds) -> list[list[str]]:
    return [
        ["policy", thresholds.policy],
        *([name.replace("_", " "), _setting(getattr(thresholds, name))] for name in SETTINGS),
    ]


def _setting(value: float | str | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
