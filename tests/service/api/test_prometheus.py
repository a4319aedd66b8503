"""Tests that Debian's Prometheus scrapes the service as `deploy/prometheus` says, and answers Grafana's queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.support.forked import Server
from benchmarks.support.gloo import free_port
from benchmarks.support.server import make_token
from tests.service.api.test_operating import NAME, start_training
from tula_wire import routes

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@dataclass
class Scraped:
    """A Prometheus that scrapes a service with one training run."""

    url: str
    boss: httpx.Client
    labels: dict[str, str]

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return Prometheus's result for an instant query."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", answer
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series


@pytest.fixture(scope="module")
def scraped(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(sqlite_template, folder / "tula.db")
    database = f"sqlite:///{folder / 'tula.db'}"
    secret = make_token(database, "admin")
    headers = {"Authorization": f"Bearer {secret}"}
    with Server(database) as server, httpx.Client(base_url=server.url, headers=headers) as boss:
        job, run = start_training(boss)
        batch = {"rank": 0, "boot_id": "b", "sequence": [0, 1], "step": [0, 1], "step_time_s": [0.5, 0.5]}
        assert boss.post(routes.RUN_SAMPLES.format(run_id=run), json=batch).status_code == 202
        (folder / "token").write_text(secret)
        configuration = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        configuration["global"]["scrape_interval"] = "1s"
        (scrape,) = configuration["scrape_configs"]
        scrape["authorization"]["credentials_file"] = str(folder / "token")
        scrape["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        address = f"127.0.0.1:{free_port()}"
        words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "log").open("w") as log:
            command = ["prometheus", *words, f"--web.listen-address={address}"]
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            made = Scraped(f"http://{address}", boss, {"job_id": job, "job_name": NAME, "run_id": run})
            until_scraped(made, process, folder / "log")
            yield made
        finally:
            process.terminate()
            process.wait(30)


def until_scraped(made: Scraped, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the first scrape is stored."""
    ends = time.monotonic() + 60
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < ends, log.read_text()
        try:
            if made.ask("tula_build_info"):
                return
        except (httpx.TransportError, json.JSONDecodeError):  # it is starting
            pass
        time.sleep(0.05)


def test_prometheus_scrapes_each_figure_of_a_running_training(scraped: Scraped) -> None:
    (step,) = scraped.ask("tula_job_step_seconds")
    assert scraped.labels.items() <= step["metric"].items()
    assert float(step["value"][1]) == 0.5
    for name in ("predicted_step_seconds", "eta_seconds", "spent_usd", "tokens_per_second"):
        (series,) = scraped.ask(f"tula_job_{name}")
        assert float(series["value"][1]) > 0.0


def test_prometheus_understands_every_question_of_the_grafana_board(scraped: Scraped) -> None:
    board = json.loads((ROOT / "deploy/grafana/dashboards/tula.json").read_text())
    questions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    answered = [question for question in questions if scraped.ask(question)]
    assert {question for question in questions if "tula_job_" in question} <= set(answered)


def test_promtool_has_nothing_to_say_about_the_metrics(scraped: Scraped) -> None:
    text = scraped.boss.get(routes.METRICS).text
    said = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout + said.stderr) == (0, "")
