"""`tula estimate`: computes a model's parameters, FLOPs and memory before the first run."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tula_client import TulaError
from tula_client._spec import load_spec
from tula_wire.devices import DEVICES, capacities_gib, known_device
from tula_wire.format import size as format_size

if TYPE_CHECKING:
    import torch

_GIB = 2**30
_MODEL = re.compile(r"^(\[model\][^\n]*\n)(.*?)(?=^[ \t]*\[|\Z)", re.M | re.S)


def estimate(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="Function that is called as FACTORY(batch) and returns (model, batch[, optimizer]).",
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Number of examples per rank and micro-step.")],
    device: Annotated[str | None, typer.Option(help="Accelerator, such as A100-80GB.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="SPEC.toml", help="Write the results into the [model] table of this job specification."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute a model's parameters, FLOPs and memory without a device, and print the values for its job.toml.

    FACTORY is a function that is called with a number of examples. It must return the model, the model's arguments for
    that many examples (a tensor, a tuple or a mapping) and, to include the optimizer's state, the optimizer.
    """
    sizes = _capacities(device)
    before = None if write is None else _read(write)
    model, sample, optimizer = _made(factory, batch)
    from tula_agent.measure.estimate import estimate_memory

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(
        logging.CRITICAL
    )  # no traceback before the error message
    try:
        estimated = estimate_memory(model, sample, optimizer)
    except Exception as error:  # the user's model may raise any exception
        raise typer.BadParameter(
            f"the model cannot be called with the arguments that {factory} returned ({_first_line(error)})"
        ) from None
    largest = {f"{device} {size} GiB": estimated.largest_local_batch_size(size * _GIB) for size in sizes}
    safe = {f"{device} {size} GiB": estimated.safe_local_batch_size(size * _GIB) for size in sizes}
    capacity = float(min(sizes)) * _GIB if sizes else None
    described = estimated.model_spec(factory.rpartition(":")[2], _name(optimizer), capacity)
    lines = {name: _toml(value) for name, value in described.items() if value is not None}
    if write is not None and before is not None:
        part = write.with_name(f".{write.name}.part")  # so that the file is replaced completely or not at all
        part.write_text(with_model(before, lines), encoding="utf-8")
        load_spec(part)
        part.replace(write)
    if as_json:
        facts = {name: value for name, value in vars(estimated).items() if name != "allocations"}
        plain = {**facts, "total_bytes": estimated.total_bytes(batch), "largest_local_batch_size": largest}
        plain["safe_local_batch_size"] = safe
        typer.echo(json.dumps({**plain, "model": described}))
        return
    static, total = format_size(estimated.total_bytes(0)), format_size(estimated.total_bytes(batch))
    state = "parameters, gradients and optimizer state"
    if optimizer is None:
        state = "parameters and gradients (no optimizer given)"
    typer.echo(f"parameters: {estimated.parameters:,}")
    typer.echo(f"FLOPs per example, forward and backward: {estimated.flops_per_sample:.3g}")
    typer.echo(f"activations per example: {format_size(estimated.activation_bytes_per_sample)}")
    typer.echo(f"memory at batch size {batch}: {total}, including {static} of {state}")
    for name, most in largest.items():
        typer.echo(f"largest batch on {name}: {safe[name]} (safe), {most} (expected)")
    if write is not None:
        typer.echo(f"\nwritten into the [model] table of {write}")
        return
    typer.echo("\n[model]")
    for name, value in lines.items():
        typer.echo(f"{name} = {value}")


def with_model(text: str, facts: Mapping[str, str]) -> str:
    """Return a job specification with `facts` (TOML values) in its `[model]` table; keep `name` and all other lines.

    Each fact replaces the line that sets the same field, even if that line is commented out. Raises ValueError if there
    is no `[model]` table.
    """
    table = _MODEL.search(text)
    if table is None:
        raise ValueError("it has no [model] line")
    body = table[2]
    for name, value in facts.items():
        line = re.compile(rf"^(?:#[ \t]*)?{name}[ \t]*=.*$", re.M)
        if name == "name" and re.search(r"^name[ \t]*=", body, re.M):
            continue
        if line.search(body):
            body = line.sub(lambda _, assignment=f"{name} = {value}": assignment, body, count=1)
        else:
            body = f"{body.rstrip()}\n{name} = {value}\n{body[len(body.rstrip()) :].removeprefix(chr(10))}"
    return text[: table.start(2)] + body + text[table.end(2) :]


def _read(path: Path) -> str:
    """Return the text of a job specification.

    Raises `typer.BadParameter` if the file cannot be read, is invalid, or has no `[model]` table.
    """
    try:
        load_spec(path)
        text = path.read_text(encoding="utf-8")
        with_model(text, {})
    except (TulaError, ValueError) as error:
        raise typer.BadParameter(f"--write: {path} cannot be changed ({error}): use a valid job.toml") from None
    return text


def _made(factory: str, batch: int) -> tuple[torch.nn.Module, Any, torch.optim.Optimizer | None]:
    """Return the model, batch and optimizer that the user's factory returns. Raises `typer.BadParameter`."""
    module, _, name = factory.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the working directory, as with `python -m`
    try:
        make: Callable[[int], Any] = getattr(importlib.import_module(module), name)
        made = make(batch)
    except Exception as error:  # the user's module may raise any exception
        raise typer.BadParameter(f"{factory!r} cannot be called ({_first_line(error)}): use MODULE:FACTORY") from None
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise typer.BadParameter(f"{factory} must return a tuple of model, batch and, optionally, optimizer")
    model, sample, *rest = made
    return model, sample, rest[0] if rest else None


def _capacities(device: str | None) -> tuple[int, ...]:
    """Return the memory capacities of the named device in GiB, or an empty tuple if `device` is None.

    Raises `typer.BadParameter` for an unknown device.
    """
    if device is None:
        return ()
    name = known_device(device)
    sizes = capacities_gib(device, DEVICES[name]) if name is not None else ()
    if not sizes:
        names = ", ".join(sorted(name for name, device in DEVICES.items() if device.capacities_gib))
        raise typer.BadParameter(f"--device: the memory of {device!r} is unknown: use one of {names}")
    return sizes


def _name(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name that job specifications use for the optimizer, or the default name if there is no optimizer."""
    kind = type(optimizer).__name__
    if optimizer is None or (kind == "SGD" and optimizer.defaults["momentum"]):
        return "momentum"
    return "sgd" if kind == "SGD" else "adam" if kind in ("Adam", "AdamW", "NAdam", "RAdam") else "other"


def _toml(value: str | bool | float) -> str:
    """Return a plain value as TOML."""
    if isinstance(value, (bool, str)):
        return json.dumps(value)
    return f"{value:_}" if isinstance(value, int) else f"{value:.4g}"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
