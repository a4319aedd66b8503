"""Tests the walks in docs/architecture.md: every function exists, and an earlier one on the walk refers to it.

A walk is a heading that begins with "Walk: " and, below it, a list in which each item begins with a function:

    ## Walk: sample to recommendation

    1. `tula_agent.recorder:Recorder.step`: hands a step's times to the exporter
    2. `tula_service.api.samples:send_samples` via HTTP: reads the body

An item has "via" and a few words if one process, thread or framework hands over to another, so that no function before
it on the walk names its function.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
ROOTS = {"tula_wire": "client", "tula_client": "client", "tula_agent": "agent", "tula_service": "service"}
HEADING = re.compile(r"^#+ Walk: (.+)$")
ITEM = re.compile(r"^\s*(?:\d+\.|-) `([\w.]+):([\w.]+)`(?: via ([^:]+))?")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Step:
    """One function, method or class on a walk."""

    module: str
    name: str
    via: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    @property
    def called(self) -> set[str]:
        """Return the identifiers by which a caller refers to the step; for a constructor, this is its class."""
        owner, _, last = self.name.rpartition(".")
        return {owner.rpartition(".")[2]} if last in ("__init__", "__call__", "__enter__") else {last}


def walks(text: str) -> dict[str, list[Step]]:
    """Return the walks of a document, by the words of their headings."""
    found: dict[str, list[Step]] = {}
    steps: list[Step] | None = None
    for line in text.splitlines():
        if line.startswith("#"):
            heading = HEADING.match(line)
            steps = found.setdefault(heading[1], []) if heading else None
        elif steps is not None and (item := ITEM.match(line)):
            steps.append(Step(item[1], item[2], item[3]))
    return found


@cache
def parsed(module: str) -> ast.Module | None:
    """Return the syntax tree of a module, or None if there is no such file."""
    package, *rest = module.split(".")
    path = ROOT.joinpath(ROOTS.get(package, "."), package, *rest)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def definition(step: Step) -> Definition | None:
    """Return the definition of a step, or None if there is none."""
    scope: ast.AST | None = parsed(step.module)
    for name in step.name.split("."):
        inside = [] if scope is None else ast.iter_child_nodes(scope)
        scope = next((one for one in inside if isinstance(one, Definition) and one.name == name), None)
    return scope if isinstance(scope, Definition) else None


def identifiers(node: ast.AST) -> set[str]:
    """Return every name and attribute inside a definition."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def problems(steps: list[Step]) -> list[str]:
    """Return one sentence for each error in a walk."""
    found, known = [], set[str]()
    for number, step in enumerate(steps):
        node = definition(step)
        if node is None:
            found.append(f"{step} does not exist")
            continue
        if number and step.via is None and not step.called & known:
            found.append(f"no function before {step} refers to it: correct the walk, or say via what it is reached")
        known |= identifiers(node)
    return found


WALKS = walks(DOCUMENT.read_text(encoding="utf-8"))


def test_every_walk_follows_the_code() -> None:
    assert set(WALKS) == {"step to shipment", "sample to recommendation", "tula tune to result"}
    assert [name for name, steps in WALKS.items() if len(steps) < 5] == []
    assert [problem for steps in WALKS.values() for problem in problems(steps)] == []


def test_a_change_of_a_runs_state_reaches_its_recommendation_in_few_files() -> None:
    steps = WALKS["sample to recommendation"]
    modules = [step.module for step in steps[[str(step) for step in steps].index("tula_service.usecases.runs:patch") :]]
    visits = [module for before, module in zip(["", *modules], modules, strict=False) if module != before]
    assert len(modules) <= 25
    assert len(set(modules)) <= 9
    assert len(visits) - len(set(modules)) <= 6


def test_each_package_is_described_in_six_sentences() -> None:
    paragraphs = DOCUMENT.read_text(encoding="utf-8").split("## Packages")[1].split("## ")[0].strip().split("\n\n")
    sentences = {text.split("`")[1]: len(re.findall(r"[.](?=\s|$)", text)) for text in paragraphs}
    assert sentences == dict.fromkeys(ROOTS, 6)


def test_usecases_and_analysis_have_at_most_26_files() -> None:
    service = ROOT / "service" / "tula_service"
    files = [*(service / "usecases").glob("[!_]*.py"), *(service / "analysis").glob("[!_]*.py")]
    assert len(files) <= 26


def test_every_function_that_the_table_of_changes_names_exists() -> None:
    table = DOCUMENT.read_text(encoding="utf-8").split("## Where to change what")[1].split("\n## ")[0]
    places = re.findall(r"`([\w/]+)\.py:([\w.]+)`", table)
    assert len(places) > 10
    for path, name in places:
        found = [
            Step(".".join(file.relative_to(ROOT / folder).with_suffix("").parts), name)
            for package, folder in ROOTS.items()
            for file in (ROOT / folder / package).rglob(f"{path.removeprefix(package + '/')}.py")
        ]
        assert any(definition(step) is not None for step in found), f"{path}.py has no {name}"


EXAMPLE = """
# Title
## Walk: a retry
1. `tula_client.cli.app:main`: starts
- `tula_wire.routes:nothing`: does not exist
2. `tula_service.settings:Settings.read` via the environment: reads
3. `tula_service.cli:prune`: unrelated
## Another heading
1. `tula_client.cli.app:main`: no walk
"""


def test_a_walk_that_names_what_is_not_there_or_not_called_is_refused() -> None:
    found = walks(EXAMPLE)
    assert list(found) == ["a retry"]
    assert [step.via for step in found["a retry"]] == [None, None, "the environment", None]
    missing, unrelated = problems(found["a retry"])
    assert missing == "tula_wire.routes:nothing does not exist"
    assert unrelated.startswith("no function before tula_service.cli:prune refers to it")
