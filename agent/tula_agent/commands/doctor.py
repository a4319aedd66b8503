"""`tula doctor`: checks everything that a job needs, and explains how to fix each problem."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Literal

import httpx
import typer

from tula_client._request import proxy_for
from tula_wire import routes

State = Literal["ok", "warning", "wrong"]
MAX_CLOCK_SKEW_S = 5.0
MIN_FREE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Finding:
    """Result of one check; `remedy` is empty if the check passed."""

    name: str
    state: State
    found: str
    remedy: str = ""


def _check(name: str, passed: bool, fact: str, remedy: str, otherwise: State = "wrong") -> Finding:
    """Return the result of the check `name`: ok if it passed, or else the state `otherwise` with `remedy`."""
    return Finding(name, "ok", fact) if passed else Finding(name, otherwise, fact, remedy)


def examine(environ: Mapping[str, str], client: httpx.Client, origin: str = "TULA_URL") -> list[Finding]:
    """Return all findings, in the order in which their problems would stop a job; `origin` is the source of the URL."""
    findings = [Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")]
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("torch", _torch),
        ("ranks", lambda: _ranks(environ)),
        ("service", lambda: _service(environ, client, origin)),
        ("disk", lambda: _disk(environ)),
    ]
    for name, check in checks:
        try:
            findings.extend(check())
        except Exception as error:
            findings.append(Finding(name, "wrong", f"the check failed: {error!r}", "report this as a bug"))
    return findings


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "wrong", f"cannot be imported ({error})", "run `pip install 'tula[agent]'`")
        return
    major, minor = (int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield _check("torch", (major, minor) >= (2, 4), torch.__version__, "use torch 2.4 or newer")
    dist = torch.distributed
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available", lambda: False)()]
    fact = ", ".join(backends) or "no backend"
    yield _check("distributed", bool(backends), fact, "install a build of torch with gloo or nccl")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        fact = f"torch was built for CUDA {built} but finds no device" if built else "none: this torch is a CPU build"
        remedy = "run nvidia-smi, and check that the driver is new enough for this build of torch"
        yield _check("cuda", built is None, fact, remedy, "warning")
        return
    supported = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})"
        native = any(arch.startswith((f"sm_{major}", f"compute_{major}")) for arch in supported)
        yield _check(
            f"cuda:{index}",
            native,
            name,
            "install torch wheels that support this GPU (for a V100, from the cu126 index)",
        )
    try:
        import pynvml

        pynvml.nvmlInit()
        yield Finding("nvml", "ok", str(pynvml.nvmlSystemGetDriverVersion()))
    except Exception as error:
        yield Finding(
            "nvml",
            "warning",
            f"not available ({error})",
            "run `pip install nvidia-ml-py` to measure the device's memory and energy",
        )


def _ranks(environ: Mapping[str, str]) -> Iterator[Finding]:
    for names in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        rank, size = (environ.get(name) for name in names)
        if rank is None and size is None:
            continue
        valid = (rank or "").isdigit() and (size or "").isdigit() and int(rank or 0) < int(size or 0)
        fact = f"rank {rank} of {size} ({names[0]})" if valid else f"{names[0]}={rank}, {names[1]}={size}"
        yield _check(
            "ranks", valid, fact, "start the script with torchrun, or set both variables so that 0 <= rank < size"
        )
        return
    yield Finding("ranks", "ok", "one process (no RANK in the environment)")


def _service(environ: Mapping[str, str], client: httpx.Client, origin: str) -> Iterator[Finding]:
    url = environ.get("TULA_URL") or "http://127.0.0.1:8321"
    if environ.get("TULA_DISABLED", "") not in ("", "0"):
        yield Finding("agent", "warning", "TULA_DISABLED is set, so nothing is measured", "unset TULA_DISABLED")
    named = f"{url} (from {origin})"
    try:
        health = client.get(url + routes.HEALTH)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        proxy, remedy = proxy_for(url), "start `tula serve`, or set TULA_URL"
        if proxy is not None:
            named, remedy = (
                f"{named}, through the proxy {proxy},",
                "add the service's host to NO_PROXY if no proxy is needed",
            )
        yield Finding("service", "wrong", f"{named} does not respond ({error})", remedy)
        return
    answers = health.status_code == 200
    fact = named if answers else f"{named} returned status {health.status_code}"
    yield _check("service", answers, fact, "check that TULA_URL is the address of the service")
    if not answers:
        return
    if "date" in health.headers:
        # The header has whole seconds.
        ahead_s = parsedate_to_datetime(health.headers["date"]).timestamp() + 0.5 - time.time()
        apart = f"the service's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
        agrees = abs(ahead_s) <= MAX_CLOCK_SKEW_S
        remedy = "start a time service such as chrony (measurements work without it)"
        yield _check("clock", agrees, "agrees with the service's clock" if agrees else apart, remedy, "warning")
    ready = client.get(url + routes.READY)
    fact = "reachable, and the schema is current" if ready.status_code == 200 else _detail(ready)
    remedy = "see the service's log; after an upgrade, run `tula migrate`"
    yield _check("database", ready.status_code == 200, fact, remedy)
    token = environ.get("TULA_TOKEN")
    answer = client.get(url + routes.JOBS, headers={"authorization": f"Bearer {token}"} if token else {})
    if answer.status_code == 401:
        yield Finding(
            "token",
            "wrong",
            "refused" if token else "not set",
            "set TULA_TOKEN to a token from `tula token create`",
        )
    elif answer.status_code == 403:
        yield Finding("token", "ok", "accepted, but valid only for its own job")
    elif answer.status_code < 400:
        yield Finding("token", "ok", "accepted" if token else "not set, and not needed")
    else:
        yield Finding("token", "warning", _detail(answer), "see the service's log")


def _disk(environ: Mapping[str, str]) -> Iterator[Finding]:
    from tula_agent.config import default_spool_dir
    from tula_agent.ship.spool import spool_files

    spool = Path(environ.get("TULA_SPOOL_DIR") or default_spool_dir())
    try:
        spool.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = spool / f".doctor-{os.getpid()}"
        probe.write_bytes(b"ok")
        probe.unlink()
    except OSError as error:
        yield Finding("disk", "wrong", f"{spool} is not writable ({error.strerror})", "set TULA_SPOOL_DIR")
        return
    free = shutil.disk_usage(spool).free
    size = f"{free / 2**30:.1f} GiB" if free >= 2**30 else f"{free // 2**20} MiB"
    fact, remedy = f"{size} free in {spool}", "free some disk space, or set TULA_SPOOL_DIR"
    yield _check("disk", free >= MIN_FREE_BYTES, fact, remedy, "warning")
    waiting = spool_files(spool)
    if waiting:
        count = "1 file is" if len(waiting) == 1 else f"{len(waiting)} files are"
        yield Finding("spool", "warning", f"{count} waiting to be sent", f"run `tula upload {spool}`")


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check everything that a job needs, and explain how to fix each problem."""
    with httpx.Client(timeout=5.0) as client:
        findings = examine(os.environ, client, getattr(context.obj, "origin", "TULA_URL"))
    wrong = sum(finding.state == "wrong" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"wrong": wrong, "findings": [asdict(finding) for finding in findings]}))
    else:
        marks = {"ok": "ok     ", "warning": "WARNING", "wrong": "WRONG  "}
        for finding in findings:
            typer.echo(f"{marks[finding.state]} {finding.name}: {finding.found}")
            if finding.remedy:
                typer.echo(f"        {finding.remedy}")
    raise typer.Exit(1 if wrong else 0)
