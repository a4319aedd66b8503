"""Tests the architecture: permitted imports, the cost of imports, the public interface, and what must be documented."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tula_client.cli.app import build
from tula_service.settings import PREFIX, Settings
from tula_wire import routes

ROOT = Path(__file__).parents[1]
PRODUCT = ("client", "agent", "service")
SURFACE = ROOT / "tests" / "public_surface.json"
PUBLIC = ("tula_wire", "tula_client", "tula_agent")
HEAVY = {
    "tula_wire": ["httpx", "torch", "numpy", "fastapi", "sqlalchemy"],
    "tula_client": ["torch", "numpy", "pandas", "altair", "vl_convert", "typer", "fastapi", "sqlalchemy"],
    "tula_client.cli.app": ["torch", "numpy"],
    "tula_agent": ["torch", "pandas", "sklearn", "scipy", "fastapi", "sqlalchemy", "pydantic"],
    "tula_agent.run": ["pandas", "sklearn", "scipy", "fastapi", "sqlalchemy"],
    "tula_service.app": ["torch", "tula_client", "tula_agent", "sklearn", "kneed", "scipy.stats", "scipy.signal"],
    "tula_service.perfmodel.planner": ["torch", "fastapi", "sqlalchemy", "httpx", "sklearn", "scipy.stats", "kneed"],
}
ROUTES = sorted(filter(str.isupper, vars(routes)))


def documents() -> str:
    """Return README and all documents as one text."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_imports_point_one_way() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("module", HEAVY)
def test_importing_stays_light(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert module in loaded
    assert not loaded & set(HEAVY[module])


def test_the_public_surface_is_what_was_decided() -> None:
    """After a decision to change the interface, write what this test computes into `public_surface.json`."""
    surface = {name: sorted(importlib.import_module(name).__all__) for name in PUBLIC}
    assert surface == json.loads(SURFACE.read_text())


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists(name: str) -> None:
    module = importlib.import_module(name)
    missing = [one for one in module.__all__ if not hasattr(module, one)]
    assert not missing


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return every node of a file's syntax tree, from a cache, since several rules read the same files."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports anywhere."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_benchmarks_experiments_and_examples_import_nothing_from_tests() -> None:
    assert [path for path in modules("benchmarks", "experiments", "examples") if "tests" in imported(path)] == []


def test_the_product_imports_no_benchmark_experiment_example_or_test() -> None:
    outside = {"benchmarks", "experiments", "examples", "tests"}
    assert [path for path in modules(*PRODUCT) if imported(path) & outside] == []


def test_the_shared_helpers_import_no_benchmark() -> None:
    """Both benchmarks and tests depend on `benchmarks/support`, which must depend on neither."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules("benchmarks/support"))
    found = set(re.findall(r"(?:from|import) (benchmarks[.\w]*)", text))
    assert {name for name in found if not name.startswith("benchmarks.support")} == set()


def private_names(path: Path) -> set[str]:
    """Return the functions, methods and attributes of a file with names that begin with one underscore."""
    found = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_uses(path: Path, names: set[str]) -> list[str]:
    """Return the places where a file imports, patches or reads one of these names, except reads from `self`."""
    found = []
    for node in nodes(path):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and ast.unparse(node.value) not in ("self", "cls", "os", "weakref.finalize")
        ):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tula_"):
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {one.name}" for one in node.names if one.name in names]
        elif isinstance(node, ast.Call):
            texts = {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
            if not (texts & names and ast.unparse(node.func).endswith(("setattr", "getattr", "delattr"))):
                continue
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in sorted(texts & names)]
    return found


def test_tests_and_benchmarks_use_no_private_name_of_the_product() -> None:
    names = set().union(*(private_names(path) for path in modules(*PRODUCT)))
    folders = ("tests", "benchmarks", "experiments", "examples")
    assert [use for path in modules(*folders) for use in private_uses(path, names)] == []


def commands(command: Any, words: tuple[str, ...] = ("tula",)) -> list[str]:
    """Return every command that has no subcommands, as a user types it."""
    children = getattr(command, "commands", None)
    if not children:
        return [" ".join(words)]
    return [line for name, child in sorted(children.items()) for line in commands(child, (*words, name))]


ALL_COMMANDS = commands(typer.main.get_command(build()))


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_command_is_documented(command: str) -> None:
    assert re.search(rf"\b{re.escape(command)}\b", documents())


@pytest.mark.parametrize("setting", [PREFIX + name.upper() for name in Settings.model_fields])
def test_every_setting_is_documented(setting: str) -> None:
    assert re.search(rf"\b{setting}\b", documents())


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_is_documented(name: str) -> None:
    assert getattr(routes, name) in documents()
