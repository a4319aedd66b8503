"""The service in this process, with a job, a run and tokens to try it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.support.configurations import make_configuration
from tests.support.inprocess import InProcess
from tula_service.app import TOKEN_CACHE_S, create_app
from tula_service.domain import NewRun
from tula_service.settings import Settings
from tula_service.store import Store
from tula_service.usecases.access import ANONYMOUS, issue_token
from tula_wire import JobSpec

HOST = "http://localhost"
SPEC = JobSpec.model_validate(
    {
        "name": "digits",
        "model": {"name": "digits-net"},
        "dataset": {"size": 1797},
        "cluster": {"max_nodes": 4},
        "batch": {"max_local_batch_size": 256},
    }
)


@dataclass
class Tenant:
    """A project with a job, a run of it, and a token for each scope that it may have."""

    project_id: str
    job_id: str
    run_id: str
    user: str
    agent: str


class Service:
    """The running application, its store, and clients of it."""

    def __init__(self, url: str, *, token_cache_s: float = TOKEN_CACHE_S, **settings: object) -> None:
        self.settings = Settings(database=url, **settings)  # type: ignore[arg-type]
        self.app = create_app(self.settings, token_cache_s=token_cache_s)
        self.store: Store = self.app.state.services.store
        self.transport = InProcess(self.app)

    def client(self, token: str | None = None, **headers: str) -> httpx.Client:
        """A client that sends this token."""
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return httpx.Client(transport=self.transport, base_url=HOST, headers=headers)

    def token(self, scope: str, **bound: str) -> str:
        """A fresh token's secret."""
        secret = issue_token(self.store, ANONYMOUS, name=scope, scope=scope, **bound).secret  # type: ignore[arg-type]
        self.app.state.services.access.forget(None)
        return secret

    def tenant(self, name: str) -> Tenant:
        """A project called `name`, with everything in it."""
        with self.store.transaction() as tx:
            project = tx.projects.create(name)
            job, _ = tx.jobs.create(project.id, SPEC.model_dump(mode="json") | {"name": name, "objective": "knee"})
            run = tx.runs.create(job.id, NewRun("train", make_configuration(1, 1, 32), "running"))
        return Tenant(project.id, job.id, run.id, self.token("user", project=name), self.token("agent", job_id=job.id))

    def another_job(self, tenant: Tenant) -> str:
        """The id of one more job in the tenant's project."""
        with self.store.transaction() as tx:
            spec = SPEC.model_dump(mode="json") | {"name": "another", "objective": "knee"}
            return tx.jobs.create(tenant.project_id, spec)[0].id

    def close(self) -> None:
        """Shut down."""
        self.transport.shut_down()


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    """Starts services that are shut down when the test ends."""
    started: list[Service] = []

    def start_one(url: str, **options: object) -> Service:
        started.append(Service(url, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for service in started:
        service.close()


@pytest.fixture
def service(sqlite_url: str, start: Callable[..., Service]) -> Service:
    """A service on SQLite."""
    return start(sqlite_url)


@pytest.fixture
def red(service: Service) -> Tenant:
    """A tenant."""
    return service.tenant("red")


@pytest.fixture
def blue(service: Service) -> Tenant:
    """Another tenant."""
    return service.tenant("blue")


__all__ = ["SPEC", "Service", "Tenant"]
