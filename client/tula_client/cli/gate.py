"""Implements `tula gate`, which measures how a code change affects training speed."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from tula_client import Client
from tula_client._errors import ExitCode, JobNotFoundError, LaunchError, TulaError, UsageError
from tula_client._spec import load_spec
from tula_client.cli.launch import (
    RETRY,
    TIMEOUT_S,
    Command,
    Folder,
    LauncherName,
    StopCommand,
    TimeLimit,
    checked_templates,
    open_reporter,
    open_runner,
    orderly_end,
)
from tula_client.cli.output import Json, emit
from tula_client.launch.gate import (
    FEWEST_PAIRS,
    Side,
    alternate,
    checkout,
    git,
    refuse_tracked_paths,
    resolve_commit,
    slower,
)
from tula_client.launch.process import start
from tula_client.launch.registration import register
from tula_client.launch.tune import named_configuration
from tula_wire import Candidate, Configuration, Estimate, JobSpec, Recommendation
from tula_wire.format import configuration as in_words
from tula_wire.format import duration, money, percent, size


def gate(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.toml", help="The job's specification.")],
    command: Command,
    against: Annotated[str, typer.Option(metavar="REVISION", help="The commit, tag or branch to compare with.")],
    configuration: Annotated[
        str | None,
        typer.Option(
            metavar="NODESxBATCH",
            help="Configuration to launch, as in 2x64 or 2x64,precision=bf16 (default: the recommended configuration, "
            "or the smallest if there is no recommendation).",
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=FEWEST_PAIRS, help="Number of launches of each revision.")] = 5,
    threshold: Annotated[
        float,
        typer.Option(
            min=0, metavar="PERCENT", help="Exit with code 3 only if steps become slower by more than this percentage."
        ),
    ] = 2.0,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result as Markdown for a pull request comment.")
    ] = None,
    launcher: LauncherName = None,
    stop_command: StopCommand = None,
    work_dir: Folder = Path(".tula"),
    time_limit: TimeLimit = 1800.0,
    as_json: Json = False,
) -> int:
    """Compare the training speeds of this revision and another by launching both alternately."""
    job_spec = load_spec(spec)
    if launcher == "ray":
        raise UsageError("--launcher ray cannot compare two revisions, because Ray runs only one folder on its cluster")
    template, stop = checked_templates(command, launcher, stop_command, job_spec)
    if markdown is not None and not markdown.parent.is_dir():
        raise UsageError(f"--markdown {markdown}: the folder {markdown.parent} does not exist")
    refuse_tracked_paths(command, os.environ)
    commit = resolve_commit(against)
    changed = git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    if changed == commit:
        raise UsageError(f"--against {against} is the current revision, without changes: there is nothing to compare")
    number = secrets.token_hex(3)
    with (
        orderly_end(),
        Client(timeout_s=TIMEOUT_S, retry=RETRY) as client,
        open_reporter(as_json) as reporter,
        checkout(commit, work_dir.resolve()) as base_folder,
        ExitStack() as ends,
    ):
        earlier = _recommendation(client, job_spec)
        sides = []
        for name, revision, folder in (("the base", commit, base_folder), ("the change", changed, Path.cwd())):
            job = register(client, _at_revision(job_spec, revision, number)).job
            ends.callback(_archive, client, job.id)
            options: dict[str, Any] = {"time_limit_s": time_limit, "stop_template": stop}
            options["start_command"] = partial(start, folder=folder)
            made = open_runner(client, job, work_dir.resolve(), reporter, **options)
            sides.append(Side(f"{name} ({_short(revision)})", job, ends.enter_context(made)))
        base, change = sides
        first_guess = client.recommendation(base.job.id).candidates
        chosen = _configuration(configuration, job_spec, earlier, first_guess)
        reporter.note(f"Launching {in_words(chosen)} alternately on {base.name} and {change.name}, {pairs} times each.")
        result = slower(*alternate(base, change, chosen, template, pairs))
        peaks = [side.peak_bytes(chosen) for side in sides]
    sentence = _sentence(result, peaks, None if earlier is None else earlier.chosen)
    exceeded = result.low > 0.0 and result.value * 100.0 > threshold
    plain = {
        "slower": result,
        "configuration": chosen,
        "base": commit,
        "change": changed,
        "pairs": pairs,
        "base_peak_bytes": peaks[0],
        "change_peak_bytes": peaks[1],
        "exceeded": exceeded,
        "sentence": sentence,
    }
    emit(plain, Text(sentence), as_json)
    if markdown is not None:
        _write(markdown, sentence, in_words(chosen), base.name, pairs, exceeded, threshold)
    return ExitCode.SLOWER if exceeded else ExitCode.OK


def _short(revision: str) -> str:
    return revision[:7] + revision[40:]


def _at_revision(spec: JobSpec, revision: str, number: str) -> JobSpec:
    """Return the specification of a separate job for one revision, so that the revisions do not share measurements."""
    return spec.model_copy(update={"name": f"{spec.name}@{_short(revision)}-{number}"})


def _archive(client: Client, job_id: str) -> None:
    with suppress(TulaError):  # archiving only keeps lists of jobs short
        client.archive_job(job_id)


def _recommendation(client: Client, spec: JobSpec) -> Recommendation | None:
    """Return the recommendation for the job with this specification's name, or None if no job has that name."""
    try:
        return client.handle(spec.name).recommendation()
    except JobNotFoundError:
        return None


def _configuration(
    word: str | None, spec: JobSpec, earlier: Recommendation | None, candidates: list[Candidate]
) -> Configuration:
    configurations = [candidate.configuration for candidate in candidates]
    if word is not None:
        return named_configuration(word, {}, configurations, spec.options, "--configuration")
    if earlier is not None and earlier.chosen is not None:
        return earlier.chosen.configuration
    if not configurations:
        raise LaunchError("the job has no candidate configuration: tula recommend prints the reason")
    return min(configurations, key=lambda candidate: (candidate.num_nodes, candidate.global_batch_size, candidate))


def _amounts(share: Estimate, whole: float = 1.0) -> tuple[float, float, float]:
    """Return the absolute values of a share and of the ends of its interval, each multiplied by `whole`.

    The interval must exclude zero. In the result, the lower of the two ends comes first.
    """
    low, high = sorted((abs(whole * share.low), abs(whole * share.high)))
    return abs(whole * share.value), low, high


def _sentence(result: Estimate, peaks: list[float | None], chosen: Candidate | None) -> str:
    """Return a sentence that states the change in step time, cost and memory, with 95 % intervals."""
    if result.low <= 0.0 <= result.high:
        ends = f"{percent(result.low, signed=True)} and {percent(result.high, signed=True)}"
        said = (
            f"This change makes no difference that these launches can detect: the change in step time is between {ends}"
        )
    else:
        word, worth = ("slower", "costs") if result.value > 0.0 else ("faster", "saves")
        value, low, high = (100.0 * share for share in _amounts(result))
        said = f"This change makes the training {value:.1f} % [{low:.1f}, {high:.1f}] {word}"
        if chosen is not None:
            worths = ["{} [{}, {}]".format(*map(duration, _amounts(result, chosen.total_time_s.value)))]
            if chosen.cost_usd is not None:
                worths.append("{} [{}, {}]".format(*map(money, _amounts(result, chosen.cost_usd.value))))
            said += f", which {worth} {' and '.join(worths)} at the recommended configuration"
    before, after = peaks
    if before is not None and after is not None and abs(after - before) >= 0.01 * before:
        said += f"; memory {'+' if after > before else '-'}{size(abs(after - before))} a rank"
    return f"{said}."


def _write(
    path: Path, sentence: str, configuration: str, base: str, pairs: int, exceeded: bool, threshold: float
) -> None:
    """Write the result as Markdown for a pull request comment. Raises `UsageError` if the file cannot be written."""
    verdict = f"**Slower by more than the allowed {threshold:g} %.** " if exceeded else ""
    text = (
        f"### How this change affects training speed\n\n{verdict}{sentence}\n\n"
        f"Based on {pairs} pairs of launches of {configuration}, alternating with {base}. Intervals are 95 % "
        "confidence intervals.\n"
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--markdown {path} cannot be written: {error.strerror}") from None
