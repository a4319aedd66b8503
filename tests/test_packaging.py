"""Tests that wheel and source archive can be built, contain only what users need, and have few dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.support.environment import isolated
from benchmarks.support.server import Server

ROOT = Path(__file__).resolve().parents[1]
EXTRAS: dict[str, tuple[str, ...]] = {
    "": ("torch", "numpy", "fastapi", "sqlalchemy", "altair", "pandas"),
    "agent": ("fastapi", "sqlalchemy", "pandas", "sklearn", "scipy"),
    "service": ("torch", "psycopg", "pandas", "lightning", "transformers"),
}
"""By extra: what must not be in its environment. That the rest is there, the tests show that run its programs."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the source archive and the wheel built from that archive, as they would be published."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """Return the path of the wheel."""
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    """Return the wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message, extra: str | None) -> set[str]:
    """Return the names of the distributions that `tula[extra]` needs, including those of other extras."""
    found: set[str] = set()
    for line in metadata.get_all("Requires-Dist", []):
        wanted = Requirement(line)
        named = wanted.marker is not None and "extra" in str(wanted.marker)
        if named and not (extra and wanted.marker and wanted.marker.evaluate({"extra": extra})):
            continue
        if wanted.name == "tula":
            for inner in wanted.extras:
                found |= requirements(metadata, inner)
        else:
            found.add(wanted.name.lower())
    return found


def alone(bin: Path, folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment, with none of Tula's variables except these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TULA_", "PYTHON"))}
    return subprocess.run(
        [str(bin / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | variables,
        cwd=folder,
    )


def test_the_wheel_holds_four_typed_packages_pages_and_migrations_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    packages = {"tula_wire", "tula_client", "tula_agent", "tula_service"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages | {"tula.pth", "tula_startup.py"}
    assert {f"{package}/py.typed" for package in packages} <= names
    assert "tula_service/migrations/env.py" in names
    assert any(name.startswith("tula_service/migrations/versions/") for name in names)
    dashboard = ROOT / "service" / "tula_service" / "dashboard"
    for path in (*dashboard.glob("templates/*"), *dashboard.glob("static/*")):
        assert f"tula_service/dashboard/{path.relative_to(dashboard).as_posix()}" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".db", ".pyc"))]


def test_the_source_archive_holds_what_a_build_and_the_tests_need(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "migrations/env.py", "Makefile"):
        assert wanted in names
    assert "tests/test_packaging.py" in names
    assert not [name for name in names if name.startswith((".venv", "artefacts", "dist"))]


def test_the_version_is_the_same_everywhere_and_a_release(
    environments: dict[str, Path], metadata: Message, tmp_path: Path
) -> None:
    served = alone(environments["service"], tmp_path, "python", "-c", "import tula_service as s; print(s.__version__)")
    printed = alone(environments[""], tmp_path, "tula", "--version")
    assert served.stdout.split() == printed.stdout.split()[-1:] == [metadata["Version"]], served.stderr + printed.stderr
    assert not Version(metadata["Version"]).is_prerelease
    assert f"\n## {metadata['Version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert metadata["License-Expression"] == "Apache-2.0"


def test_an_index_learns_the_pages_and_the_pythons_that_are_tested(metadata: Message) -> None:
    labels = {line.partition(",")[0] for line in metadata.get_all("Project-URL", [])}
    assert "Paper" in labels
    assert metadata["Requires-Python"] == ">=3.11"
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["check"]["strategy"]["matrix"]["python"]
    stated = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier", [])))
    assert stated == tested
    image = re.search(r"^ARG BASE=python:(3\.\d+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    assert image is not None
    assert image[1] in tested


def test_each_extra_requires_only_what_it_uses(metadata: Message) -> None:
    base = {"httpx", "platformdirs", "pydantic", "rich", "typer"}
    assert requirements(metadata, None) == base
    agent, service = requirements(metadata, "agent"), requirements(metadata, "service")
    assert "torch" in agent
    assert not agent & {"fastapi", "uvicorn", "sqlalchemy", "pandas", "scikit-learn", "altair"}
    assert {"fastapi", "sqlalchemy", "scikit-learn"} <= service
    assert not service & {"torch", "altair", "pandas", "psycopg", "lightning", "transformers"}


RUNTIME = ("agent", "archive", "mcp", "service", "postgres", "otel", "notebook")
FOUND_BY_NAME = {"httptools", "uvloop", "psycopg", "pyarrow", "fastapi-offline"}
"""Loaded by name: by uvicorn, SQLAlchemy by the URL, pandas when it writes Parquet, and files of a page."""


def test_a_module_imports_every_required_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for each in RUNTIME for line in project["optional-dependencies"][each]]
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("client", "agent", "service", "migrations")
        for path in (ROOT / folder).rglob("*.py")
    )
    imported = {name.split(".")[0] for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", code, re.MULTILINE)}
    imported |= set(re.findall(r"""import_module\("(\w+)""", code))
    modules = packages_distributions()
    for name in {Requirement(line).name for line in lines} - {"tula"} - FOUND_BY_NAME:
        tops = {top for top, owners in modules.items() if canonicalize_name(name) in map(canonicalize_name, owners)}
        assert tops & imported, f"{name} is required, and no module imports it"


def test_every_requirement_names_a_file_that_exists() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'^  "[^"]+",? +# ((?:client|agent|service|tests|docs|examples|migrations)[\w/.]*)', text, re.M)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_extra_and_the_group_dev_are_pinned_by_the_constraints() -> None:
    pinned = {
        line.split("==")[0].strip().lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = (*document["project"]["optional-dependencies"].values(), *document["dependency-groups"].values())
    wanted = {Requirement(line).name.lower().replace("_", "-") for lines in lists for line in lines}
    assert wanted <= pinned


def test_make_installs_every_extra_that_the_tests_import_and_the_group_dev() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (installed,) = re.findall(r"--editable '\.\[([\w,]+)\]' --group dev$", makefile, re.M)
    assert set(installed.split(",")) == set(extras) - {"examples"}


@pytest.fixture(scope="session")
def environments(wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the `bin` folders of one environment without extras and one per extra, each with only its dependencies."""
    return {
        extra: isolated(tmp_path_factory.mktemp(extra or "base"), requirements(metadata, extra or None), wheel)
        for extra in EXTRAS
    }


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_environment_of_an_extra_has_nothing_of_other_extras(
    environments: dict[str, Path], extra: str, tmp_path: Path
) -> None:
    absent = EXTRAS[extra]
    code = f"import importlib.util as u; print([u.find_spec(name) for name in {absent!r}])"
    done = alone(environments[extra], tmp_path, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([None] * len(absent))


def test_the_command_shows_only_what_is_installed(environments: dict[str, Path], tmp_path: Path) -> None:
    service = alone(environments["service"], tmp_path, "tula", "--help")
    client = alone(environments[""], tmp_path, "tula", "--help")
    assert (service.returncode, client.returncode) == (0, 0), service.stderr + client.stderr
    for command in ("tune", "run", "recommend"):
        assert f" {command} " in client.stdout
    for command in ("serve", "migrate"):
        assert f" {command} " in service.stdout


def test_the_agent_trains_without_a_server(environments: dict[str, Path], tmp_path: Path) -> None:
    code = """
import torch, tula_agent
run = tula_agent.init(dataset_size=4)
model = torch.nn.Linear(2, 1)
optimizer = tula_agent.TulaOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), policy="none")
run.watch(model, optimizer)
for batch in run.steps([torch.ones(2, 2)] * 3):
    model(batch).sum().backward()
    optimizer.step()
print(float(model.bias))
"""
    done = alone(environments["agent"], tmp_path, "python", "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_process_of_a_run_starts_with_the_hook_and_any_other_without(
    environments: dict[str, Path], tmp_path: Path
) -> None:
    """This holds under every launcher that passes on the run's variables; neither process imports the agent."""
    code = "import sys; print(*(name in sys.modules for name in ('tula_startup', 'tula_agent', 'torch')))"
    of_run = alone(environments["agent"], tmp_path, "python", "-c", code, TULA_RUN_ID="run-1")
    other = alone(environments["agent"], tmp_path, "python", "-c", code, TULA_URL="http://tula")
    assert (of_run.stdout.split(), of_run.stderr) == (["True", "False", "False"], "")
    assert (other.stdout.split(), other.stderr) == (["False"] * 3, "")


def test_the_service_migrates_and_serves_without_torch_or_postgres(
    environments: dict[str, Path], tmp_path: Path
) -> None:
    database = str(tmp_path / "tula.db")
    migrated = alone(environments["service"], tmp_path, "tula", "migrate", "--database", database)
    assert migrated.returncode == 0, migrated.stderr
    with Server(database, python=str(environments["service"] / "python")) as server:
        assert httpx.get(f"{server.url}/readyz").json() == {"status": "ready"}
        assert "<html" in httpx.get(f"{server.url}/").text
