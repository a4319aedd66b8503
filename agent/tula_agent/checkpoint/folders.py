"""Checkpoint folders on disk: which are complete, the name of the next one, which may be deleted."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

KEEP: Final = 2
"""Complete checkpoints that are kept; older ones are deleted once a newer one is complete."""

_COMPLETE: Final = "complete.json"
_NAME: Final = re.compile(r"step-([0-9]+)(?:\.([0-9]+))?")


def create(root: Path, step: int) -> Path:
    """An empty folder below `root` for a checkpoint of `step`; an unfinished one of that name is deleted.

    Its name is newer than that of every complete checkpoint of the same step.
    """
    number = 1 + max((age for of, age in map(_age, _complete(root)) if of == step), default=0)
    folder = root / (f"step-{step:010d}" if number == 1 else f"step-{step:010d}.{number}")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Mark `folder` as complete, with `facts`."""
    _replace(folder / _COMPLETE, lambda path: path.write_text(json.dumps(facts)))


def facts_of(folder: Path) -> dict[str, Any]:
    """The facts that `seal` wrote."""
    facts: dict[str, Any] = json.loads((folder / _COMPLETE).read_text())
    return facts


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint below `root`."""
    return next(reversed(_complete(root)), None)


def superseded(folder: Path) -> list[Path]:
    """To delete now that `folder` is complete: all but the newest of the last KEEP steps, and older unfinished ones."""
    found = _complete(folder.parent)
    last_of_step = list({_age(path)[0]: path for path in found}.values())
    kept = {folder, *last_of_step[-KEEP:]}
    unfinished = [path for path in _all(folder.parent) if path not in found and _age(path) < _age(folder)]
    return [*(path for path in found if path not in kept), *unfinished]


def delete(folder: Path) -> None:
    """Delete what can be deleted; the mark of completeness first, since the process may be killed in between."""
    try:
        (folder / _COMPLETE).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)


def write(path: Path, value: Any) -> None:
    """Write `value` in torch's format; a crash leaves nothing under the name `path`."""
    _replace(path, lambda new: torch.save(value, new))


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    """Write to another name, fsync, then rename: a crash leaves no half file under `path`."""
    new = path.with_name(f".{path.name}.new")
    fill(new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)


def _all(root: Path) -> list[Path]:
    """All checkpoint folders, oldest first; copies under other names are ignored."""
    return sorted((path for path in root.glob("step-*") if _NAME.fullmatch(path.name)), key=_age)


def _complete(root: Path) -> list[Path]:
    return [path for path in _all(root) if (path / _COMPLETE).exists()]


def _age(folder: Path) -> tuple[int, int]:
    """Step, and number among the checkpoints of that step."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
