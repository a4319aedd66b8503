"""Creates a virtual environment with only the dependencies of a distribution's extras; no package index is needed.

The distributions of the running interpreter are linked, not copied, so nothing is downloaded. Packages that an extra
does not require are absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["bring", "closure", "isolated"]


def closure(requirements: set[str]) -> dict[str, Distribution]:
    """Return all distributions that `requirements` need on this machine and interpreter, keyed by name."""
    packages: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        installed = packages.setdefault(canonicalize_name(requirement.name), distribution(requirement.name))
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            inner = [Requirement(line) for line in installed.requires or []]
            todo += [needed for needed in inner if needed.marker is None or needed.marker.evaluate({"extra": extra})]
    return packages


def link(source: str, target: Path) -> None:
    """Link a file and, for a module, its byte code, since compiling all modules would take longer than the tests do."""
    if target.is_symlink():  # byte code that was linked with its module
        return
    target.symlink_to(source)
    if source.endswith(".py") and (cached := Path(cache_from_source(source))).exists():
        folder = target.parent / "__pycache__"
        folder.mkdir(exist_ok=True)
        (folder / cached.name).symlink_to(cached)


def bring(requirements: set[str], site: Path) -> None:
    """Link the closure of `requirements` into a folder of packages, file by file."""
    real: dict[Path, str] = {}  # the real folder of each folder
    for package in closure(requirements).values():
        for file in package.files or []:
            if ".." in file.parts:  # a script outside the folder of packages
                continue
            folder = site / file.parent
            if folder not in real:
                folder.mkdir(parents=True, exist_ok=True)
                real[folder] = os.path.realpath(Path(str(file.locate())).parent)
            link(f"{real[folder]}/{file.name}", folder / file.name)


def isolated(folder: Path, requirements: set[str], wheel: Path) -> Path:
    """Create a virtual environment with the closure of `requirements` and the wheel; return its `bin` folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    bring(requirements, site)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True, timeout=120)
    return folder / "bin"
