"""`tula scaling`: show and set how a job's gradients are scaled."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from tula_client._client import Client
from tula_client._errors import UsageError
from tula_client.cli.output import JobName, Json, emit, facts
from tula_wire import ScalingPatch, ScalingPolicy, ScalingThresholds

Policy = Annotated[ScalingPolicy | None, typer.Option(help="Policy, instead of the job's.")]
SETTINGS = ("policy", "granularity", "delta", "small_batch_size", "static_scale", "s_min", "s_max", "refresh_steps")


def show(job: JobName, policy: Policy = None, as_json: Json = False) -> None:
    """Show the policy and its thresholds; what is not set follows the script."""
    with Client() as client:
        found = client.scaling(client.handle(job).id, policy=policy).thresholds
    assert found is not None  # no ETag was sent
    emit(found, facts(_rows(found)), as_json)


def set_(
    job: JobName,
    values: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help=f"Any of {', '.join(SETTINGS)}.")],
    policy: Annotated[ScalingPolicy | None, typer.Option(help="Policy that the values belong to.")] = None,
    as_json: Json = False,
) -> None:
    """Set the policy or its thresholds, also of a running training; NAME=null returns one to tuning and the script."""
    patch = ScalingPatch.model_validate(dict(map(_pair, values)))
    with Client() as client:
        found = client.patch_scaling(client.handle(job).id, patch, policy=policy)
    emit(found, facts(_rows(found)), as_json)


def _pair(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or name not in SETTINGS:
        raise UsageError(f"{word!r} is no setting: give NAME=VALUE with a name of {', '.join(SETTINGS)}")
    if name == "policy" and value not in get_args(ScalingPolicy):
        raise UsageError(f"policy: {value!r} is unknown: use one of {', '.join(get_args(ScalingPolicy))}")
    return name, None if value == "null" else value


def _rows(found: ScalingThresholds) -> list[list[str]]:
    rows = [[name.replace("_", " "), _text(getattr(found, name))] for name in SETTINGS]
    if found.gradient_noise_scale is not None:
        rows.append(["noise scale", f"{found.gradient_noise_scale:,.0f} examples"])
    return rows + ([["why", found.reason]] if found.reason else [])


def _text(value: float | str | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
