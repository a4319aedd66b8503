"""`tula probe`: measures all-reduces between ranks and stores them for jobs on nodes like these."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from tula_client._client import Client
from tula_client._errors import TulaError, UsageError
from tula_client.cli.output import Json, emit, estimate, table
from tula_client.launch import process
from tula_client.launch.spec import load_spec
from tula_wire import AllReduceCost, ClusterSpec, Estimate, Fabric, FabricProbe, read
from tula_wire.format import duration, percent, size
from tula_wire.samples import PROBE_MARK

MODULE = ("-m", "tula_agent.commands.probe")
_POLL_S = 0.1
_LINES_OF_FAILURE = 20


def probe(
    command: Annotated[
        list[str], typer.Argument(metavar="-- LAUNCHER...", help="The launcher with its options, without a script.")
    ],
    spec: Annotated[
        Path | None, typer.Option(metavar="SPEC.toml", help="The job whose cluster this is; without it, default nodes.")
    ] = None,
    instance_type: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which of the job's clusters, if it has several.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of measuring, about.")] = 10.0,
    time_limit: Annotated[float, typer.Option(min=1, help="Seconds after which the launcher is stopped.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Measure how fast ranks reduce bytes, and store it for jobs on nodes like these."""
    nodes = _cluster(spec, instance_type)
    with tempfile.TemporaryDirectory() as folder:
        lines = _launched([*command, *MODULE, str(seconds)], Path(folder) / "probe.log", time_limit)
    measured = _measured(lines)
    if nodes is not None:
        names = {name: getattr(nodes, name) for name in ("instance_type", "accelerator", "network_gbps")}
        measured = measured.model_copy(update=names)
    with Client() as client:
        stored = client.send_probe(measured)
    emit(stored, _view(stored), as_json)


def _cluster(path: Path | None, instance_type: str | None) -> ClusterSpec | None:
    """The probed cluster of the job; without a job, one that only has this name."""
    if path is None:
        return None if instance_type is None else ClusterSpec(instance_type=instance_type, max_nodes=1)
    clusters = load_spec(path).cluster
    found = [each for each in clusters if instance_type in (None, each.instance_type)]
    if len(found) != 1:
        known = ", ".join(each.instance_type for each in clusters)
        raise UsageError(f"--instance-type: {path} has the clusters {known}: name one of them")
    return found[0]


def _launched(command: list[str], log: Path, time_limit_s: float) -> list[str]:
    """What the command wrote; raises `TulaError` with its end if it fails or takes too long."""
    started = process.start(command, environment=os.environ, log=log)
    end = time.monotonic() + time_limit_s
    try:
        while (status := started.poll()) is None and time.monotonic() < end:
            time.sleep(_POLL_S)
    finally:
        started.stop()
    lines = process.LogLines(log).new(last=True)
    if status != 0:
        ended = f"failed with status {status}" if status is not None else f"did not end within {time_limit_s:g} s"
        raise TulaError("\n  ".join([f"the launcher {ended}:", *lines[-_LINES_OF_FAILURE:]]))
    return lines


def _measured(lines: list[str]) -> FabricProbe:
    for line in lines:
        _, mark, body = line.partition(PROBE_MARK)
        if mark:
            try:
                return read(FabricProbe, body)
            except ValidationError as error:
                raise TulaError(f"the probe's result cannot be used: {error.errors()[0]['msg']}") from None
    raise TulaError(
        "the launcher ended without a result: it must print what its ranks print, and start python with what follows it"
    )


def _view(stored: Fabric) -> RenderableType:
    measured = stored.probe
    rows = [["all ranks", str(measured.num_nodes * measured.ranks_per_node), *_cost(stored.all_ranks)]]
    if stored.in_node is not None:
        rows.append(["one node", str(measured.ranks_per_node), *_cost(stored.in_node)])
    sizes = [[size(each.size_bytes), duration(each.time_s), percent(each.relative_sd)] for each in measured.all_ranks]
    return Group(
        table((">bytes", ">all-reduce", ">spread"), sizes),
        Text(),
        table(("over", ">ranks", ">latency (90 %)", ">bytes/s (90 %)"), rows),
        Text(f"Stored for {measured.instance_type} nodes ({measured.backend}).", style="dim"),
    )


def _cost(cost: AllReduceCost) -> list[str]:
    beta = cost.seconds_per_byte
    rate = Estimate(value=1.0 / beta.value, low=1.0 / beta.high, high=1.0 / beta.low)
    return [estimate(cost.latency_s), estimate(rate, "bytes")]
