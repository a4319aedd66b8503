"""Implements `tula init`, which writes a job.toml based on the user's launch command and this machine's devices."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from tula_client._errors import UsageError
from tula_client._spec import load_spec
from tula_client.cli.output import Json, emit
from tula_client.launch.template import Template
from tula_wire.enums import Objective
from tula_wire.text import printable

_OPTIONS: Final = {
    "global_batch_size": re.compile(r"(.*\.)?(global|total)-(batch-?size|batch)"),
    "local_batch_size": re.compile(
        r"(.*\.)?((local|micro|per-device|per-device-train|per-gpu|train)-)?batch-?[sS]ize|micro-batch|b|bs|batch"
    ),
    "ranks_per_node": re.compile(r"nproc-per-node|num-processes|gpus-per-node"),
    "num_nodes": re.compile(r"nnodes|num-machines"),
    "epochs": re.compile(r"(.*\.)?((num-|max-)?epochs|num-train-epochs)"),
}
"""Patterns of option names without leading dashes, by the placeholder or setting whose value the option gives."""
_QUERY: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_PLAIN: Final = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
_DEFAULT_BATCH: Final = 64
_SPAN: Final = 4
"""The batches to try range from a quarter to four times the command's batch."""


def init(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The command that starts your script today.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; an existing file is not overwritten.")
    ] = Path("job.toml"),
    as_json: Json = False,
) -> None:
    """Write a job.toml for a script, based on its command and this machine's devices, and print how to tune the job."""
    template, numbers = _varied(command)
    tune = _tune(output, template)
    text = _document(tune, _script(command), numbers, _devices())
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{output} already exists: choose another file with --output, or remove it") from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror or error}") from None
    Template(template).check(load_spec(output))
    plain = {"written": str(output), "command": list(template)}
    emit(plain, f"Wrote {output}. Fill in the values that its comments mark, then run:", as_json)
    if not as_json:
        print(printable(f"    {tune}"))


def _devices() -> list[tuple[str, int]]:
    """Return the name and memory in bytes of each visible NVIDIA device, or an empty list if there is no driver."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(",") for line in done.stdout.splitlines()]
    devices = [(name.strip(), int(size) * 2**20) for name, _, size in rows if size.strip().isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return devices if visible is None else devices[: sum(name.strip() not in ("", "-1") for name in visible.split(","))]


def _varied(command: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the command as a template, and a mapping from each placeholder to the number that it replaced.

    The mapping also contains the number of epochs, which is not replaced in the command. Raises `UsageError` if the
    command has no batch size.
    """
    words, values = list(command), dict[str, int]()
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        option = next((key for key, pattern in _OPTIONS.items() if pattern.fullmatch(_bare(name, equals))), None)
        at = index if equals else index + 1
        if option is None or at == len(words):
            continue
        value = value if equals else words[at]
        if value.isdecimal() and int(value) > 0:
            values.setdefault(option, int(value))
        elif option != "ranks_per_node" or value not in ("auto", "gpu", "cpu"):
            continue
        if option != "epochs":
            words[at] = f"{name}={{{option}}}" if equals else f"{{{option}}}"
    template = Template(tuple(words))
    if not template.placeholders & {"local_batch_size", "global_batch_size"}:
        raise UsageError(
            "the command has no batch size: write {local_batch_size} where the script expects its batch size, as in "
            "`tula init -- torchrun train.py --batch-size {local_batch_size}`"
        )
    return template.words, values


def _bare(name: str, equals: str) -> str:
    """Return an option's name without its leading dashes, or an empty string if the word is not an option."""
    dashed = name.startswith("-")
    return name.lstrip("-").replace("_", "-") if dashed or equals else ""


def _script(command: Sequence[str]) -> str:
    """Return the name of the script or module that the command runs."""
    script = next((Path(word).stem for word in command if word.endswith(".py")), None)
    if script is None and "-m" in command[:-1]:
        script = command[len(command) - list(reversed(command)).index("-m")].rpartition(".")[2]
    return script or Path(command[0]).stem


def _document(tune: str, script: str, numbers: dict[str, int], devices: list[tuple[str, int]]) -> str:
    """Return the text of a job.toml; each required value that is unknown is replaced by a guess and marked."""
    ranks = len(devices) or numbers.get("ranks_per_node", 1)
    stated = numbers.get("local_batch_size") or numbers.get("global_batch_size", 0) // ranks
    batch = stated or _DEFAULT_BATCH
    name = json.dumps(script, ensure_ascii=False)
    around = f"your command has {batch}" if stated else "FILL IN"
    single = []
    if ranks > 1:
        single = [
            ("# To tune the number of ranks, describe each rank as a node, at its share of the machine's price:", ""),
            (f"# max_nodes = {ranks}", ""),
            ("# ranks_per_node = 1", ""),
        ]
    device, of_ranks = [], "processes on this machine; no NVIDIA device was found"
    if devices:
        of_ranks = f"{len(devices)} x {devices[0][0]}"
        least = min(memory_bytes for _, memory_bytes in devices)
        device = [(f"accelerator = {json.dumps(devices[0][0])}", ""), (f"memory_bytes_per_rank = {least:_}", "")]
    lines = [
        (f"name = {name}", ""),
        (f"epochs = {numbers.get('epochs', 1)}", ""),
        ('objective = "balanced"', f"or {', '.join(get_args(Objective)[1:])}"),
        ("\n[model]", ""),
        (f"name = {name}", "FILL IN: jobs with the same network improve each other's predictions"),
        ("# parameters = 25_600_000", "tula estimate --write job.toml fills in this value"),
        ("\n[dataset]", ""),
        ("size = 50_000", "FILL IN: examples per epoch"),
        ("\n[cluster]", ""),
        ("max_nodes = 1", "increase it if the command can start ranks on several nodes"),
        (f"ranks_per_node = {ranks}", of_ranks),
        *single,
        *device,
        ("# price = { usd_per_node_hour = 3.06 }", "FILL IN to see what training costs"),
        ("\n[batch]", "examples per rank and micro-step"),
        ("# If the command's batch size is the total over all ranks, write {global_batch_size} in the command.", ""),
        (f"min_local_batch_size = {max(1, batch // _SPAN)}", ""),
        (f"max_local_batch_size = {batch * _SPAN}", around),
        ("\n# [options]", "values to try for placeholders such as --precision {precision}, today's value first"),
        ('# precision = ["fp32", "bf16"]', ""),
        ('# compile = ["off", "on"]', ""),
    ]
    listed = (f"{setting:<40}# {comment}" if comment else setting for setting, comment in lines)
    return "\n".join([f"# {tune}", *listed]) + "\n"


def _tune(output: Path, template: Sequence[str]) -> str:
    """Return the `tula tune` command as shell text; braces need no quotes, since the shell does not expand them."""
    listed = ("tula", "tune", str(output), "--", *template)
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in listed)
