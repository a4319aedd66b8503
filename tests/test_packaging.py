"""Wheel and source archive: they build, hold what runs and nothing else, and each extra brings only its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {without!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, the wheel built from the archive as an index would get it."""
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
    """The wheel."""
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed into an empty folder, as pip does it, without its dependencies."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    """The wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message, extra: str | None) -> set[str]:
    """Names of the distributions that `tula[extra]` needs itself, its own extras followed."""
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


def run(installed: Path, code: str, *, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python on the installed wheel, in which the packages of `without` cannot be imported."""
    blocked = BLOCKER.format(without=without)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    environment |= {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", blocked + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
        cwd=installed,
    )


def test_the_wheel_holds_four_typed_packages_pages_and_migrations_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    packages = {"tula_wire", "tula_client", "tula_agent", "tula_service"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
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


def test_the_version_comes_from_git_and_is_the_same_everywhere(installed: Path, metadata: Message) -> None:
    done = run(installed, "import tula_service, tula_client; print(tula_service.__version__)")
    assert done.returncode == 0, done.stderr
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert configured["tool"]["hatch"]["version"]["source"] == "vcs"
    assert metadata["Version"] in done.stdout or done.stdout.strip()
    assert metadata["License-Expression"] == "Apache-2.0"


def test_each_extra_asks_only_for_its_own(metadata: Message) -> None:
    assert requirements(metadata, None) == {"httpx", "pydantic"}
    agent, service = requirements(metadata, "agent"), requirements(metadata, "service")
    assert "torch" in agent
    assert not agent & {"fastapi", "uvicorn", "sqlalchemy", "pandas", "scikit-learn", "altair"}
    assert {"fastapi", "sqlalchemy", "altair", "vl-convert-python"} <= service
    assert not service & {"torch", "pandas", "psycopg", "lightning", "transformers"}


def test_every_extra_is_pinned_by_the_constraints() -> None:
    pinned = {
        line.split("==")[0].strip().lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = {Requirement(line).name.lower().replace("_", "-") for lines in extras.values() for line in lines} - {
        "tula"
    }
    assert wanted <= pinned


def test_the_client_runs_without_torch_or_a_server(installed: Path) -> None:
    away = ("torch", "numpy", "fastapi", "sqlalchemy", "altair", "typer", "rich", "pandas")
    done = run(installed, "import tula_client, tula_wire; print(tula_client.__file__)", without=away)
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout


def test_the_agent_runs_without_the_service(installed: Path) -> None:
    away = ("fastapi", "uvicorn", "sqlalchemy", "pandas", "sklearn", "altair", "typer", "rich")
    done = run(installed, "import tula_agent; print(tula_agent.__file__)", without=away)
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout


def test_the_service_serves_from_the_wheel_without_torch_or_postgres(installed: Path, tmp_path: Path) -> None:
    code = f"""
from tula_service.app import create_app
from tula_service.settings import Settings
from tula_service.store import Store
from tula_service.store.schema import upgrade_schema
import tula_service
store = Store.open({str(tmp_path / "tula.db")!r})
upgrade_schema(store.engine)
store.close()
app = create_app(Settings(database={str(tmp_path / "tula.db")!r}))
app.state.services.store.close()
print(tula_service.__file__)
"""
    done = run(installed, code, without=("torch", "psycopg", "pandas", "lightning", "transformers"))
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout
