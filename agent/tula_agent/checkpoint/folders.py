"""The folders of checkpoints on disk: which are complete, where the next one goes, which may be deleted."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["KEEP", "begin", "delete", "facts_of", "newer_than", "newest", "seal", "superseded", "write"]

KEEP: Final = 2
"""Complete checkpoints that are kept; older ones are deleted once a newer one is complete.

One more is kept: the newest that was made under other settings of gradient scaling, to which `roll_back` goes.
"""

_COMPLETE: Final = "complete.json"
_UNKNOWN: Final = object()
_OURS: Final = re.compile(r"step-([0-9]+)(?:\.([0-9]+))?")


def begin(root: Path, step: int) -> Path:
    """An empty folder below `root` for a checkpoint of `step`: what a crash left goes, what is complete stays.

    It is newer than every complete one of that step: the names of those deleted since are not taken again.
    """
    again = 1 + max((age for of, age in map(_age, _complete(root)) if of == step), default=0)
    folder = root / (f"step-{step:010d}" if again == 1 else f"step-{step:010d}.{again}")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Let `folder` be read from now on."""
    _replace(folder / _COMPLETE, lambda path: path.write_text(json.dumps(facts)))


def facts_of(folder: Path) -> dict[str, Any]:
    """What `seal` was given."""
    facts: dict[str, Any] = json.loads((folder / _COMPLETE).read_text())
    return facts


def newest(root: Path, *, not_after: int | None = None) -> Path | None:
    """The newest complete checkpoint below `root`, of step `not_after` at the latest."""
    return next((path for path in reversed(_complete(root)) if not_after is None or _age(path)[0] <= not_after), None)


def newer_than(folder: Path) -> list[Path]:
    """Complete checkpoints beside `folder` that were made after it."""
    return [path for path in _complete(folder.parent) if _age(path) > _age(folder)]


def superseded(folder: Path) -> list[Path]:
    """What may go now that `folder` is complete.

    That is all but the newest of the last steps and the newest under other scaling settings than `folder`'s, and what
    crashes left unfinished before it.
    """
    found = _complete(folder.parent)
    last_of_step = list({_age(path)[0]: path for path in found}.values())
    of_now = _settings(folder)
    other = [path for path in last_of_step if _settings(path) not in (of_now, _UNKNOWN)]
    kept = {folder, *last_of_step[-KEEP:], *other[-1:]}
    unfinished = [path for path in _ours(folder.parent) if path not in found and _age(path) < _age(folder)]
    return [*(path for path in found if path not in kept), *unfinished]


def delete(folder: Path) -> None:
    """As far as it can be deleted; first of all it counts as complete no more, for that may be all that time allows."""
    try:
        (folder / _COMPLETE).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)


def write(path: Path, value: Any) -> None:
    """`value` in torch's format under the name `path`, or nothing under that name."""
    _replace(path, lambda new: torch.save(value, new))


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    """Write beside `path`, bring it to disk, then take its name: a crash leaves no half file under that name."""
    new = path.with_name(f".{path.name}.new")
    fill(new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)


def _ours(root: Path) -> list[Path]:
    """Oldest first; a copy that someone put beside them under another name is none of ours."""
    return sorted((path for path in root.glob("step-*") if _OURS.fullmatch(path.name)), key=_age)


def _complete(root: Path) -> list[Path]:
    return [path for path in _ours(root) if (path / _COMPLETE).exists()]


def _settings(folder: Path) -> Any:
    """Of gradient scaling; unknown where they cannot be read, which is nothing to end a training for."""
    try:
        return facts_of(folder).get("scaling")
    except (OSError, ValueError):
        return _UNKNOWN


def _age(folder: Path) -> tuple[int, int]:
    """Its step, and which one of that step it is."""
    match = _OURS.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
