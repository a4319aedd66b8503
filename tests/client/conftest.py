"""Runs the service for the client tests in a thread of this process, behind a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tula_client import Client
from tula_wire import JobSpec

if TYPE_CHECKING:  # fixtures import the service: no test of make quick needs it
    from fastapi import FastAPI


@contextmanager
def application(folder: Path) -> Iterator[FastAPI]:
    """Yield the application on a new, migrated SQLite file in `folder`."""
    from benchmarks.support.server import migrate
    from tula_service.app import create_app
    from tula_service.settings import Settings

    database = str(folder / "tula.db")
    migrate(database)
    built = create_app(Settings(database=database))
    yield built
    built.state.services.store.close()


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve the application on a free port of this machine; yield its address."""
    import uvicorn

    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """Return the application that the tests share; each test registers jobs under different names."""
    with application(tmp_path_factory.mktemp("client")) as built:
        yield built


@pytest.fixture(scope="session")
def address(app: FastAPI) -> Iterator[str]:
    """Return the address of the application that the tests share."""
    with serving(app) as url:
        yield url


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    """Return a client of the service."""
    with Client(address, token="") as made:
        yield made


def job_spec(name: str) -> JobSpec:
    """Return the specification of a job with twelve candidates."""
    return JobSpec.model_validate(
        {
            "name": name,
            "model": {"name": "resnet50"},
            "dataset": {"size": 50_000},
            "epochs": 10,
            "cluster": {
                "max_nodes": 4,
                "memory_bytes_per_rank": 8 * 2**30,
                "price": {"usd_per_node_hour": 2.5},
            },
            "batch": {"min_local_batch_size": 32, "max_local_batch_size": 256},
            "search": "partial",
        }
    )


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> JobSpec:
    """Return the specification of a job that is named after the test."""
    return job_spec(request.node.name[:200])
