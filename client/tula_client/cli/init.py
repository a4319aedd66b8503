"""`tula init`: writes a job.toml from the command of a script and the devices of this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from tula_client._errors import UsageError
from tula_client.cli.output import Json, emit
from tula_client.launch.spec import load_spec
from tula_client.launch.template import Template
from tula_wire.text import printable

_BATCH: Final = re.compile(r"(.*\.)?(local-|micro-|per-device-|per-device-train-|train-)?batch-size|b|bs|batch")
_GLOBAL_BATCH: Final = re.compile(r"(.*\.)?(global|total)-batch-size")
_RANKS: Final = re.compile(r"nproc-per-node|num-processes|gpus-per-node")
_NODES: Final = re.compile(r"nnodes|num-machines")
_EPOCHS: Final = re.compile(r"(.*\.)?((num-|max-)?epochs|num-train-epochs)")
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_PLAIN: Final = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
_DEFAULT_BATCH: Final = 64
_SPAN: Final = 4
"""The batches to try are from a fourth to four times that of the command."""


def init(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="How you start the script today.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; an existing one is kept.")] = Path(
        "job.toml"
    ),
    as_json: Json = False,
) -> None:
    """Write a job.toml for a script from its command and this machine's devices, and print how to tune it."""
    words = _Words.of(command)
    devices = _devices()
    text = _document(words, devices, output)
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{output} exists: give another file by --output, or remove it") from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}") from None
    Template(words.template).check(load_spec(output))
    plain = {"written": str(output), "command": list(words.template)}
    emit(plain, f"Wrote {output}: fill in what its comments ask for, then", as_json)
    if not as_json:
        print(printable(f"    {_tune(output, words)}"))


@dataclass(frozen=True)
class _Device:
    """An accelerator as its driver names it, and its memory in bytes."""

    name: str
    memory_bytes: int


def _devices() -> list[_Device]:
    """The NVIDIA devices that a process may see; none where there is no driver."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in done.stdout.splitlines()]
    found = [_Device(name.strip(), int(size) * 2**20) for name, _, size in rows if size.strip().isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        found if visible is None else found[: len([one for one in visible.split(",") if one.strip() not in ("", "-1")])]
    )


@dataclass(frozen=True)
class _Words:
    """What a command says: its template, and the numbers that the template's placeholders stand for, if it has any."""

    template: tuple[str, ...]
    name: str
    local_batch_size: int | None
    global_batch_size: int | None
    ranks: int | None
    epochs: int

    @classmethod
    def of(cls, command: Sequence[str]) -> _Words:
        """Raises `UsageError` if the command has no batch size to vary."""
        words, found = list(command), dict[str, int]()
        options = (
            (_GLOBAL_BATCH, "global_batch_size"),
            (_BATCH, "local_batch_size"),
            (_RANKS, "ranks_per_node"),
            (_NODES, "num_nodes"),
            (_EPOCHS, "epochs"),
        )
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            option = next((one for known, one in options if known.fullmatch(_bare(name, equals))), None)
            at = index if equals else index + 1
            if option is None or at == len(words):
                continue
            value = value if equals else words[at]
            if value.isdecimal() and int(value) > 0:
                found.setdefault(option, int(value))
            elif option != "ranks_per_node" or value not in ("auto", "gpu", "cpu"):
                continue
            if option != "epochs":
                words[at] = f"{name}={{{option}}}" if equals else f"{{{option}}}"
        template = Template(tuple(words))
        if not template.placeholders & {"local_batch_size", "global_batch_size"}:
            raise UsageError(
                "the command has no batch size: write {local_batch_size} where the script takes it, as in "
                "`tula init -- torchrun train.py --batch-size {local_batch_size}`"
            )
        return cls(
            template.words,
            _script(command),
            found.get("local_batch_size"),
            found.get("global_batch_size"),
            found.get("ranks_per_node"),
            found.get("epochs", 1),
        )


def _bare(name: str, equals: str) -> str:
    """An option's name without dashes in front; nothing for a word that is none."""
    dashed = name.startswith("-")
    return name.lstrip("-").replace("_", "-") if dashed or equals else ""


def _script(command: Sequence[str]) -> str:
    """The name of the script or module that the command runs."""
    script = next((Path(word).stem for word in command if word.endswith(".py")), None)
    if script is None and "-m" in command[:-1]:
        script = command[len(command) - list(reversed(command)).index("-m")].rpartition(".")[2]
    return script or Path(command[0]).stem


def _document(words: _Words, devices: list[_Device], output: Path) -> str:
    """The content of a job.toml; every value that is needed and unknown has a guess and a comment."""
    ranks = len(devices) or words.ranks or 1
    stated = words.local_batch_size or (words.global_batch_size or 0) // ranks
    batch = stated or _DEFAULT_BATCH
    name = json.dumps(words.name, ensure_ascii=False)
    around = f"around the {batch} of your command" if stated else "FILL IN"
    device = []
    if devices:
        least = min(one.memory_bytes for one in devices)
        device = [(f"accelerator = {json.dumps(devices[0].name)}", ""), (f"memory_bytes_per_rank = {least:_}", "")]
    lines = [
        (f"name = {name}", ""),
        (f"epochs = {words.epochs}", ""),
        ('objective = "balanced"', "or time, cost, knee, time_to_quality"),
        ("\n[model]", ""),
        (f"name = {name}", "FILL IN: jobs of one network learn from each other"),
        ("# parameters = 25_600_000", "tula estimate --write job.toml fills these in"),
        ("\n[dataset]", ""),
        ("size = 50_000", "FILL IN: examples of an epoch"),
        ("\n[cluster]", ""),
        ("max_nodes = 1", "more, if the command can start ranks on several nodes"),
        (f"ranks_per_node = {ranks}", _found(devices)),
        *device,
        ("# price = { usd_per_node_hour = 3.06 }", "FILL IN to see what a training costs"),
        ("\n[batch]", "examples of a rank and micro-step"),
        (f"min_local_batch_size = {max(1, batch // _SPAN)}", ""),
        (f"max_local_batch_size = {batch * _SPAN}", around),
    ]
    listed = (f"{setting:<40}# {comment}" if comment else setting for setting, comment in lines)
    return "\n".join([f"# {_tune(output, words)}", *listed]) + "\n"


def _found(devices: list[_Device]) -> str:
    if not devices:
        return "no NVIDIA device was found: one for each process that this machine runs"
    return f"{len(devices)} x {devices[0].name}"


def _tune(output: Path, words: _Words) -> str:
    """The command to tune with, for a shell; it leaves braces alone, so they are not quoted."""
    listed = ("tula", "tune", str(output), "--", *words.template)
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in listed)
