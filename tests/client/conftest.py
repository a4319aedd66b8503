"""The service under the client tests: in this process, and over a socket; the same tests use both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from benchmarks.support.server import migrate
from tula_client import AsyncClient, Client
from tula_service.app import create_app
from tula_service.settings import Settings
from tula_wire import JobSpec

ADDRESS = "http://127.0.0.1:8321"


class InProcess(httpx.BaseTransport):
    """A synchronous road to an ASGI application; the body is read in whole."""

    def __init__(self, app: FastAPI) -> None:
        self.inner = httpx.ASGITransport(app, client=("127.0.0.1", 50_000))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def answer() -> httpx.Response:
            response = await self.inner.handle_async_request(request)
            body = b"".join([part async for part in response.stream])
            return httpx.Response(response.status_code, headers=response.headers, content=body, request=request)

        return asyncio.run(answer())


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """The application on a fresh, migrated SQLite file; each test registers jobs of other names."""
    database = str(tmp_path_factory.mktemp("client") / "tula.db")
    migrate(database)
    built = create_app(Settings(database=database))
    yield built
    built.state.services.store.close()


@pytest.fixture(scope="session")
def address(app: FastAPI) -> Iterator[str]:
    """The same application on a free port of this machine."""
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


@pytest.fixture(params=["in process", "socket"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client, over each road in turn."""
    if request.param == "socket":
        made = Client(request.getfixturevalue("address"), token="")
    else:
        made = Client(ADDRESS, token="", transport=InProcess(request.getfixturevalue("app")))
    with made:
        yield made


@pytest.fixture(params=["in process", "socket"])
def async_client(request: pytest.FixtureRequest) -> AsyncClient:
    """An asynchronous client, over each road in turn; the test closes it."""
    if request.param == "socket":
        return AsyncClient(request.getfixturevalue("address"), token="")
    app = request.getfixturevalue("app")
    return AsyncClient(ADDRESS, token="", transport=httpx.ASGITransport(app, client=("127.0.0.1", 50_000)))


def job_spec(name: str) -> JobSpec:
    """A job of twelve candidates."""
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
    """A job of this test's own."""
    return job_spec(request.node.name[:200])
