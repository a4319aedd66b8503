"""Provides the service in this process, with a job, a run and tokens."""

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
    """A project with a job, a run of the job, and a token for each scope that a tenant may have."""

    project_id: str
    job_id: str
    run_id: str
    user: str
    agent: str


class Service:
    """The running application, with its store and clients."""

    def __init__(self, url: str, *, token_cache_s: float = TOKEN_CACHE_S, **settings: object) -> None:
        self.settings = Settings(database=url, **settings)  # type: ignore[arg-type]
        self.app = create_app(self.settings, token_cache_s=token_cache_s)
        self.store: Store = self.app.state.services.store
        self.transport = InProcess(self.app)

    def client(self, token: str | None = None, **headers: str) -> httpx.Client:
        """Return a client that sends this token."""
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return httpx.Client(transport=self.transport, base_url=HOST, headers=headers)

    def token(self, scope: str, **bound: str) -> str:
        """Create a token; return its secret."""
        secret = issue_token(self.store, ANONYMOUS, name=scope, scope=scope, **bound).secret  # type: ignore[arg-type]
        self.app.state.services.access.forget(None)
        return secret

    def tenant(self, name: str) -> Tenant:
        """Create a project called `name` with a job, a run and tokens."""
        with self.store.transaction() as tx:
            project = tx.projects.create(name)
            job, _ = tx.jobs.create(project.id, SPEC.model_dump(mode="json") | {"name": name, "objective": "knee"})
            run = tx.runs.create(job.id, NewRun("train", make_configuration(1, 1, 32), "running"))
        return Tenant(project.id, job.id, run.id, self.token("user", project=name), self.token("agent", job_id=job.id))

    def another_job(self, tenant: Tenant) -> str:
        """Create another job in the tenant's project; return its id."""
        with self.store.transaction() as tx:
            spec = SPEC.model_dump(mode="json") | {"name": "another", "objective": "knee"}
            return tx.jobs.create(tenant.project_id, spec)[0].id

    def close(self) -> None:
        """Shut down the application."""
        self.transport.shut_down()


@pytest.fixture
def start() -> Iterator[Callable[..., Service]]:
    """Yield a function that starts services; they are shut down at the end of the test."""
    started: list[Service] = []

    def start_one(url: str, **options: object) -> Service:
        started.append(Service(url, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start_one
    for service in started:
        service.close()


@pytest.fixture
def service(sqlite_url: str, start: Callable[..., Service]) -> Service:
    """Start a service on SQLite."""
    return start(sqlite_url)


@pytest.fixture
def red(service: Service) -> Tenant:
    """Create a tenant."""
    return service.tenant("red")


@pytest.fixture
def blue(service: Service) -> Tenant:
    """Create another tenant."""
    return service.tenant("blue")


__all__ = ["SPEC", "Service", "Tenant"]
