"""What the Dockerfile and docker-compose.yml do, done without an engine: their own steps, commands and environment.

Nothing is copied from the files: each instruction is read and carried out below a folder that stands for the root.
What an engine alone can do is left out, and `deploy/try-image.sh` and `deploy/try-compose.sh` do it where there is one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
import sqlalchemy as sa
from packaging.requirements import Requirement

from benchmarks.support.environment import bring
from benchmarks.support.postgres import PostgresServer
from tests.test_deploy import compose, dockerfile
from tula_wire import routes

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = ("apt-get", "groupadd")
"""First words of the steps that change the system, and so are left out here."""
PASSWORD = "a-password-of-the-test"


@dataclass
class Image:
    """A folder that stands for the root of the image, and what the instructions said of it."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    left_out: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def inside(self, text: str) -> str:
        """With paths of the image as paths below the folder."""
        return re.sub(r"(?<![\w.])/(opt/tula|source|data)\b", rf"{self.root}/\1", text)

    def path(self, name: str) -> Path:
        """A path of the image, or relative to its working directory."""
        return self.root / str(Path(self.workdir) / name).lstrip("/")

    def variables(self, **more: str) -> dict[str, str]:
        """The environment of a process: the image's own, and no more of this machine than it takes to run."""
        kept = {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH") if name in os.environ}
        host = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {name: self.inside(value).replace("$PATH", host) for name, value in self.environment.items()}
        (self.root / "tmp").mkdir(exist_ok=True)
        return {"PATH": host, **kept, **own, "TMPDIR": str(self.root / "tmp"), **more}


def set_variables(image: Image, rest: str) -> None:
    """ARG and ENV: names with values that may refer to earlier ones."""
    for each in shlex.split(rest):
        name, _, value = each.partition("=")
        value = re.sub(r"\$\{(\w+)\}", lambda found: image.environment[found[1]], value)
        image.environment.setdefault(name, value)


def copy_files(image: Image, rest: str) -> None:
    """COPY: from the build stage, which is the same folder in this test, or from the checkout."""
    if rest.startswith("--from=build"):
        assert all(image.path(each).is_dir() for each in shlex.split(rest)[1:])
        return
    *sources, target = shlex.split(rest)
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, image.path(target), ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, image.path(target))


def run_command(image: Image, rest: str, **variables: str) -> None:
    """RUN, unless the command is the system's package manager or the like."""
    if rest.split()[0] in SYSTEM:
        image.left_out.append(rest.split()[0])
        return
    done = subprocess.run(
        ["bash", "-c", image.inside(rest)],
        cwd=image.path("."),
        env=image.variables(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def carry_out(image: Image, word: str, rest: str, **variables: str) -> None:
    """One instruction of the Dockerfile."""
    if word in ("ARG", "ENV"):
        set_variables(image, rest)
    elif word == "WORKDIR":
        image.workdir = rest
        image.path(".").mkdir(parents=True, exist_ok=True)
    elif word == "COPY":
        copy_files(image, rest)
    elif word == "RUN":
        run_command(image, rest, **variables)
    elif word != "FROM":
        image.said[word] = rest


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The Dockerfile carried out; pip builds and installs Tula, and finds what it needs copied in, not downloaded.

    Copied, since the steps trim what they find: through links they would trim the environment that runs the tests.
    """
    built = Image(tmp_path_factory.mktemp("root"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    tools = tmp_path_factory.mktemp("tools")
    bring(set(project["build-system"]["requires"]), tools)
    version = sysconfig.get_python_version()
    asked = set(project["project"]["dependencies"]) | set(extras["service"]) | set(extras["postgres"])
    asked |= {each for line in asked for name in Requirement(line).extras if "tula" in line for each in extras[name]}
    site = built.root / f"opt/tula/lib/python{version}/site-packages"
    bring({each for each in asked if not each.startswith("tula")}, site, shutil.copy2)
    assert not any(path.is_symlink() for path in site.rglob("*"))
    offline = {
        "PYTHONPATH": str(tools),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_CONFIG_FILE": os.devnull,
    }
    for word, rest in dockerfile():
        carry_out(built, word, rest, **offline)
    return built


@dataclass
class Stack:
    """The processes of the compose file, in the image's environment and on a separate Postgres."""

    image: Image
    database: str
    port: int

    def command(self, name: str, *arguments: str) -> list[str]:
        """What the container of this service executes."""
        asked = arguments or compose()["services"][name].get("command") or json.loads(self.image.said["CMD"])
        return [*json.loads(self.image.said["ENTRYPOINT"]), *asked]

    def variables(self, name: str) -> dict[str, str]:
        """The image's environment and the service's, its database and its port those of the test."""
        given = {key: str(value) for key, value in compose()["services"][name]["environment"].items()}
        url = re.sub(r"\$\{POSTGRES_PASSWORD:[^}]*\}", PASSWORD, given.pop("TULA_DATABASE"))
        parts = sa.make_url(url)
        assert (parts.host, parts.port) == ("postgres", 5432), "the service's name and the port that it listens on"
        there = sa.make_url(self.database)
        reached = parts.set(host=there.host, port=there.port, query=there.query)
        found = reached.render_as_string(hide_password=False)
        return self.image.variables(**given, TULA_DATABASE=found, TULA_PORT=str(self.port))

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a container's command to its end."""
        return subprocess.run(
            self.command(name, *arguments),
            env=self.variables(name),
            cwd=self.image.path("/data"),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture(scope="module")
def stack(image: Image, postgres_server: PostgresServer) -> Iterator[Stack]:
    """A role and a database as the compose file names them."""
    given = compose()["services"]["postgres"]["environment"]
    role, name = given["POSTGRES_USER"], given["POSTGRES_DB"]
    with psycopg.connect(postgres_server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{PASSWORD}'")
        connection.execute(f"CREATE DATABASE {name} OWNER {role} ENCODING 'UTF8' TEMPLATE template0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield Stack(image, postgres_server.uri, port)
    with psycopg.connect(postgres_server.uri, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP ROLE {role}")


def files(image: Image) -> set[Path]:
    """Every path except those where the container may write."""
    return {path for path in image.root.rglob("*") if path.parts[len(image.root.parts)] not in ("tmp", "data")}


def test_every_dockerfile_step_runs_except_those_that_change_the_system(image: Image) -> None:
    assert image.left_out == ["apt-get", "groupadd"]
    inside = image.path("/opt/tula")
    (site,) = inside.glob("lib/python*/site-packages")
    assert (site / "tula_service" / "migrations" / "env.py").is_file()
    assert not list(site.rglob("tests")) + list(site.rglob("*.pyi")), "what no service needs is taken out"
    assert list((site / "tula_service" / "__pycache__").glob("app.*.pyc")), (
        "the container's user cannot write byte code"
    )
    assert not (inside / "bin" / "pip").exists()


def test_compose_migrates_makes_a_token_and_serves_with_two_workers(stack: Stack) -> None:
    image = stack.image
    before = files(image)
    refused = stack.run("service")
    assert refused.returncode != 0, "without a token it listens on the loopback only"
    assert "token create" in refused.stderr
    assert compose()["services"]["service"]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    migrated = stack.run("migrate")
    assert migrated.returncode == 0, migrated.stderr
    document = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    first = re.search(r"docker compose run --rm (service) (token create .+)", document)
    assert first is not None
    made = stack.run(first[1], *shlex.split(first[2]), "--json")
    assert made.returncode == 0, made.stderr
    headers = {"Authorization": f"Bearer {json.loads(made.stdout)['secret']}"}
    log = (image.root / "tmp" / "service.log").open("w+")
    serving = subprocess.Popen(
        stack.command("service"), env=stack.variables("service"), cwd=image.path("/data"), stdout=log, stderr=log
    )
    try:
        url = f"http://127.0.0.1:{stack.port}"
        assert healthy(stack, serving), Path(log.name).read_text()
        children = [each for each in psutil.Process(serving.pid).children() if "spawn_main" in " ".join(each.cmdline())]
        assert len(children) == 2
        assert httpx.get(url + routes.JOBS).status_code == 401
        body: dict[str, Any] = {
            "name": "in-a-container",
            "model": {"name": "mlp"},
            "dataset": {"size": 1000},
            "epochs": 1,
            "cluster": {"max_nodes": 2},
        }
        assert httpx.post(url + routes.JOBS, json=body, headers=headers, timeout=60).status_code == 201
        chart = httpx.get(url + "/static/vega.js", timeout=60)
        assert len(chart.content) > 500_000, "what draws the charts came through the trimming"
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(int(compose()["services"]["service"]["stop_grace_period"].removesuffix("s"))) == 0
    finally:
        serving.kill()
        log.close()
    assert files(image) == before, "the root file system is read-only in the container"


def healthy(stack: Stack, serving: subprocess.Popen[bytes]) -> bool:
    """True once the image's own health check says so."""
    check = json.loads(stack.image.said["HEALTHCHECK"].partition("CMD")[2])
    command = [part.replace(":8321", f":{stack.port}") for part in check]
    while serving.poll() is None:
        if subprocess.run(command, env=stack.image.variables(), capture_output=True, check=False).returncode == 0:
            return True
    return False
