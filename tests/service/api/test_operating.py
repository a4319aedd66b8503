"""Tests an operator's tasks: tokens, schemas and retention on the command line, and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner, Result

from benchmarks.support.postgres import PostgresServer
from tests.service.api.conftest import SPEC, Service, Tenant
from tests.support.configurations import make_configuration
from tula_service import __version__
from tula_service.__main__ import app
from tula_service.api.auth import COOKIE
from tula_service.domain import NewRun
from tula_service.usecases.monitoring import MOST_TRAININGS
from tula_wire import Progress, routes


@pytest.fixture
def tula(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs a command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return run


def test_a_token_is_made_listed_and_revoked(tula: Callable[..., Result], service: Service) -> None:
    """The running service accepts a token that the command has created."""
    database = service.settings.database
    made = json.loads(tula("token", "create", "alice", "--json", "--database", database).stdout)
    service.app.state.services.access.forget_all()
    with service.client(made["secret"]) as client:
        assert client.get(routes.JOBS).status_code == 200
        listed = tula("token", "list", "--json", "--database", database)
        (row,) = json.loads(listed.stdout)
        assert (row["id"], row["name"], row["scope"], row["state"]) == (made["id"], "alice", "user", "valid")
        assert row["last_used_at"] is not None
        assert made["secret"] not in listed.stdout
        assert tula("token", "revoke", made["id"], "--database", database).stdout.strip() == f"Revoked {made['id']}."
        service.app.state.services.access.forget_all()
        assert client.get(routes.JOBS).status_code == 401
    assert "revoked" in tula("token", "list", "--database", database).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["token", "create", "x", "--scope", "root"], "use agent, read, user or admin"),
        (["token", "create", "x", "--scope", "agent"], "set job_id"),
        (["token", "create", "x", "--project", "nowhere"], "no project 'nowhere'"),
        (["token", "revoke", "token-0"], "no token 'token-0'"),
    ],
)
def test_a_command_that_cannot_be_done_says_so_in_a_sentence(
    tula: Callable[..., Result], sqlite_url: str, arguments: list[str], said: str
) -> None:
    done = tula(*arguments, "--database", sqlite_url)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
@pytest.mark.parametrize("arguments", [["migrate"], ["serve"], ["token", "list"]], ids=" ".join)
def test_a_database_that_cannot_hold_every_text_is_refused_with_the_remedy(
    tula: Callable[..., Result], postgres_server: PostgresServer, encoding: str, arguments: list[str]
) -> None:
    options = f"ENCODING '{encoding}' LOCALE 'C'"
    database = postgres_server.create_database(template="template0", options=options)
    done = tula(*arguments, "--database", database)
    postgres_server.drop_database(database)
    assert done.exit_code == 2
    assert f"is encoded as {encoding}" in done.stderr
    assert "CREATE DATABASE name ENCODING 'UTF8'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["migrate"], ["serve"], ["token", "list"], ["prune"]], ids=" ".join)
def test_a_file_that_is_no_database_is_refused_in_one_sentence(
    tula: Callable[..., Result], tmp_path: Path, arguments: list[str]
) -> None:
    junk = tmp_path / "notes.db"
    junk.write_text("meeting at nine, bring the figures\n" * 100)
    done = tula(*arguments, "--database", str(junk))
    assert done.exit_code == 2
    assert "is not a SQLite database" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert junk.read_text().startswith("meeting"), "untouched"


def test_a_database_created_by_the_remedy_is_accepted(
    tula: Callable[..., Result], postgres_server: PostgresServer
) -> None:
    database = postgres_server.create_database(template="template0", options="ENCODING 'UTF8' LOCALE 'C'")
    assert tula("migrate", "--database", database).exit_code == 0
    postgres_server.drop_database(database)


def test_prune_lists_jobs_and_deletes_them_only_with_yes(
    tula: Callable[..., Result], service: Service, red: Tenant, blue: Tenant
) -> None:
    database = service.settings.database
    with service.client(red.user) as client:
        assert client.patch(routes.JOB.format(job_id=red.job_id), json={"archived": True}).status_code == 200
    arguments = ("prune", "--older-than-days", "0", "--json", "--database", database)
    listed = json.loads(tula(*arguments).stdout)
    assert (listed["jobs"], listed["deleted"]) == ([red.job_id], False)
    with service.store.reading() as tx:
        assert tx.jobs.get(red.job_id).state == "archived"
    done = json.loads(tula(*arguments, "--yes").stdout)
    assert (done["jobs"], done["deleted"]) == ([red.job_id], True)
    with service.store.reading() as tx:
        assert [job.id for job in tx.jobs.list(include_archived=True).jobs] == [blue.job_id]


def test_a_missing_schema_is_refused_with_the_command_that_makes_it(
    tula: Callable[..., Result], tmp_path: Path
) -> None:
    """Only `serve` creates a schema without being asked; all commands work once a schema exists."""
    database = str(tmp_path / "new.db")
    for arguments in (["token", "list"], ["prune"]):
        refused = tula(*arguments, "--database", database)
        assert refused.exit_code == 2
        assert "tula serve --migrate" in refused.stderr
    assert tula("migrate", "--database", database).exit_code == 0
    assert tula("token", "list", "--database", database).exit_code == 0


@pytest.mark.parametrize(("port", "said"), [("99999", "at most 65535"), ("-1", "at least 0")])
def test_a_port_that_no_machine_has_is_refused_in_one_sentence(
    tula: Callable[..., Result], tmp_path: Path, port: str, said: str
) -> None:
    refused = tula("serve", "--port", port, "--database", str(tmp_path / "new.db"))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("tula: TULA_PORT must be ")
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "new.db").exists()


def test_requests_of_a_browser_session_are_counted_by_route(service: Service) -> None:
    secret = service.token("admin")
    with service.client() as browser:
        browser.cookies.set(COOKIE, secret)
        assert browser.get("/", headers={"Accept": "text/html"}).status_code == 200
    with service.client(secret) as boss:
        text = boss.get(routes.METRICS).text
    assert 'tula_requests_total{method="GET",route="/",status="200"} 1.0' in text
    assert 'route="unmatched"' not in text


def test_the_error_of_a_recommendation_that_was_followed_is_in_the_metrics(service: Service) -> None:
    with service.client(service.token("admin")) as boss:
        job = boss.post(routes.JOBS, json=SPEC.model_dump(mode="json")).json()
        chosen = job["recommendation"]["chosen"]
        run = {"kind": "train", "configuration": chosen["configuration"], "holder": "launcher"}
        path = routes.RUN.format(
            run_id=boss.post(routes.JOB_RUNS.format(job_id=job["job"]["id"]), json=run).json()["id"]
        )
        assert boss.patch(path, json={"state": "running"}).status_code == 200
        batch = {"rank": 0, "boot_id": "b", "sequence": [0, 1], "step": [0, 1], "step_time_s": [0.1, 0.1]}
        assert boss.post(f"{path}/samples", json=batch).status_code == 202
        assert "tula_prediction_error_recent{" not in boss.get(routes.METRICS).text
        for _ in range(2):
            assert boss.patch(path, json={"state": "succeeded"}).status_code == 200
        error = abs(0.1 / chosen["step_time_s"]["value"] - 1.0)
        shown = scraped(boss)["tula_prediction_error_recent"]
        assert shown == [({"quantile": str(share)}, pytest.approx(error)) for share in (0.5, 0.9)]


def test_metrics_count_requests_ingest_queue_fits_and_agents(service: Service, red: Tenant) -> None:
    """Each metric changes with what it counts, and none includes the jobs of another project."""
    blue = service.tenant("blue")
    with service.client(blue.user) as boss, service.client(red.agent) as agent:
        job = boss.post(routes.JOBS, json=SPEC.model_dump(mode="json")).json()["job"]["id"]
        batch = {"rank": 0, "boot_id": "b", "sequence": [0, 1], "step": [0, 1], "step_time_s": [0.1, 0.1]}
        for _ in range(2):
            assert agent.post(routes.RUN_SAMPLES.format(run_id=red.run_id), json=batch).status_code == 202
        chunk = {"boot_id": "b", "sequence": 0, "steps": [0, 1, 2], "columns": {"loss": [1.0, 0.5, 0.25]}}
        assert agent.post(routes.RUN_TELEMETRY.format(run_id=red.run_id), json=chunk).status_code == 202
        for _ in range(2):
            assert boss.get(routes.JOB_RECOMMENDATION.format(job_id=job)).status_code == 200
        text = boss.get(routes.METRICS).text
    found = {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")
    }
    assert found["tula_samples_stored_total"] == 2
    assert found["tula_ingest_duplicates_total"] == 2
    assert found["tula_step_values_stored_total"] == 3
    assert found[f'tula_requests_total{{method="POST",route="{routes.RUN_SAMPLES}",status="202"}}'] == 2
    assert found["tula_agents_seen"] == 1
    assert found['tula_runs{state="running"}'] == 2
    assert found['tula_runs{state="pending"}'] >= 1
    assert found['tula_fits_total{cached="true"}'] >= 1
    assert red.project_id not in text
    assert red.job_id not in text


def scraped(client: httpx.Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the (labels, value) pairs of all samples by sample name, as Prometheus's own parser reads them."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(client.get(routes.METRICS).text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


NAME = 'net "v2" \\ half'


def start_training(client: httpx.Client, **limits: object) -> tuple[str, str]:
    """Start a training run of a job whose name must be escaped in labels; return the ids of job and run."""
    spec = SPEC.model_dump(mode="json") | {"name": NAME, "epochs": 10} | limits
    spec["cluster"] = {"max_nodes": 4, "price": {"usd_per_node_hour": 3600.0}}
    spec["model"] = {"name": "digits-net", "tokens_per_example": 100}
    job = client.post(routes.JOBS, json=spec).json()["job"]["id"]
    create = {"kind": "train", "configuration": {"num_nodes": 2, "local_batch_size": 16}, "holder": "launcher"}
    run = client.post(routes.JOB_RUNS.format(job_id=job), json=create).json()["id"]
    assert client.patch(routes.RUN.format(run_id=run), json={"state": "running"}).status_code == 200
    return job, run


def test_a_running_training_is_scraped_with_speed_rest_money_and_tokens(service: Service) -> None:
    with service.client(service.token("admin")) as boss:
        job, run = start_training(boss)
        labels = {"job_id": job, "job_name": NAME, "run_id": run}
        steps = list(range(20))
        batch = {"rank": 0, "boot_id": "b", "sequence": steps, "step": steps, "step_time_s": [0.5] * 20}
        assert boss.post(routes.RUN_SAMPLES.format(run_id=run), json=batch).status_code == 202
        shown = scraped(boss)
        assert shown["tula_job_step_seconds"] == [(labels, 0.5)]
        assert shown["tula_job_tokens_per_second"] == [(labels, 6400.0)]
        left = (10 - 20 * 32 / 1797) * 1797 / 32 * 0.5
        assert shown["tula_job_eta_seconds"] == [(labels, pytest.approx(left))]
        assert shown["tula_job_spent_usd"][0][1] > 0.0
        assert shown["tula_job_predicted_step_seconds"][0][1] > 0.0
        stands = Progress.model_validate(boss.get(routes.RUN_PROGRESS.format(run_id=run)).json())
        assert (stands.done, stands.left_s) == (pytest.approx(20 * 32 / 1797 / 10), pytest.approx(left))
        assert stands.step_time_s == 0.5
        assert [labels["version"] for labels, _ in shown["tula_build_info"]] == [__version__]
        assert boss.patch(routes.RUN.format(run_id=run), json={"state": "succeeded"}).status_code == 200
        assert not [name for name in scraped(boss) if name.startswith("tula_job_")], "an ended training has no series"


def test_an_agent_learns_how_far_its_own_training_is_and_of_no_other(service: Service, red: Tenant) -> None:
    path = routes.RUN_PROGRESS.format(run_id=red.run_id)
    with service.client(red.agent) as agent, service.client(service.tenant("progress").agent) as other:
        assert Progress.model_validate(agent.get(path).json()).done is None  # before its first step
        assert other.get(path).status_code == 404


def test_a_resumed_training_of_unknown_epoch_has_no_eta(service: Service) -> None:
    with service.client(service.token("admin")) as boss:
        job, run = start_training(boss)
        batch = {"rank": 0, "boot_id": "b", "sequence": [0], "step": [0], "step_time_s": [0.5]}
        assert boss.post(routes.RUN_SAMPLES.format(run_id=run), json=batch).status_code == 202
        create = {"kind": "train", "configuration": {"num_nodes": 2, "local_batch_size": 16}, "continues": run}
        again = boss.post(routes.JOB_RUNS.format(job_id=job), json=create).json()["id"]
        assert boss.patch(routes.RUN.format(run_id=again), json={"state": "running"}).status_code == 200
        assert boss.post(routes.RUN_SAMPLES.format(run_id=again), json=batch).status_code == 202
        shown = scraped(boss)
        assert [labels["run_id"] for labels, _ in shown["tula_job_step_seconds"]] == [again]
        assert "tula_job_eta_seconds" not in shown


def test_the_number_of_trainings_that_are_scraped_is_bounded(service: Service, red: Tenant) -> None:
    with service.store.transaction() as tx:
        for _ in range(MOST_TRAININGS + 5):
            tx.runs.create(
                red.job_id, NewRun("train", make_configuration(1, 1, 32), "running", predicted_step_time_s=1.0)
            )
    with service.client(red.user) as user:
        assert len(scraped(user)["tula_job_predicted_step_seconds"]) == MOST_TRAININGS
    with service.client(service.tenant("blue").user) as other:
        assert not any(labels["job_id"] == red.job_id for labels, _ in scraped(other).get("tula_job_step_seconds", []))
