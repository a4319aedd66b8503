"""Tests the status of a TrainJob as KEP-2779 specifies it, over TLS and against Kubeflow's published models."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tests.support.tls import certificate, proxy
from tula_agent.ship.kubeflow import MOST_METRICS, trainer_status
from tula_wire import Progress

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/vit/status"
STANDS = {"done": 0.427, "left_s": 1234.4, "spent_usd": 1.25, "step_time_s": 0.5}


@dataclass
class Controller:
    """The Trainer controller's server, with the path, token and body of each post and an optional failure."""

    behaviour: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    posts: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            made.posts.append((self.path, self.headers["authorization"], body))
            if made.behaviour == "hangs":
                made.released.wait(60)
            self.send_response(503 if made.behaviour else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    token = tmp_path / "token"
    token.write_text("of-the-pod\n")
    authority, pair = certificate(tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        with proxy(pair, server.server_port) as url:
            names = {"URL": url + PATH, "CA_CERT": str(authority), "TOKEN": str(token)}
            made.variables = {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in names.items()}
            yield made
            made.released.set()
        server.shutdown()


def checked(body: dict[str, Any]) -> dict[str, Any]:
    """Return the status in a body after checking that the body has exactly the fields of the published schema."""
    from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest as Request

    (status,) = body.values()
    read = Request.from_dict(body)
    assert read is not None
    written = read.to_dict()["trainerStatus"]
    assert written.pop("lastUpdatedTime").tzinfo is not None
    assert body == {"trainerStatus": written | {"lastUpdatedTime": status["lastUpdatedTime"]}}
    assert 0 <= status.get("progressPercentage", 0) <= 100
    assert all(metric["name"] and metric["value"] for metric in status["metrics"])
    return {**status, "metrics": {metric["name"]: metric["value"] for metric in status["metrics"]}}


def test_the_first_rank_posts_how_far_its_training_is_at_a_bounded_rate(
    sink: Sink, launch: Launch, controller: Controller
) -> None:
    sink.run = STANDS
    launch("train.py", ranks=2, **controller.variables)
    assert {post[:2] for post in controller.posts} == {(PATH, "Bearer of-the-pod")}
    assert len(controller.posts) <= 3  # one within 15 s, and one at the end
    status = checked(controller.posts[-1][2])
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (42, 1234)
    assert (status["metrics"]["spent_usd"], status["metrics"]["step_time_s"]) == ("1.25", "0.5")
    assert float(status["metrics"]["loss"]) > 0.0


@pytest.mark.parametrize("behaviour", ["fails", "hangs", "no token"])
def test_a_controller_that_takes_nothing_is_one_line_in_the_log(
    sink: Sink, launch: Launch, controller: Controller, behaviour: str
) -> None:
    sink.run = STANDS
    controller.behaviour = behaviour
    missing = {"KUBEFLOW_TRAINER_SERVER_TOKEN": "/no/token"} if behaviour == "no token" else {}
    done = launch("train.py", **controller.variables | missing)
    assert done.stderr.count("the TrainJob's status") == 1
    assert sink.states == ["running", "succeeded"]
    assert sink.column("loss")


def test_a_profiling_run_is_no_progress_of_a_training(sink: Sink, launch: Launch, controller: Controller) -> None:
    sink.run = STANDS
    launch("train.py", TULA_KIND="profile", TULA_MEASURE_STEPS="8", **controller.variables)
    assert not controller.posts


def test_what_is_not_known_is_left_out_and_the_number_of_metrics_is_bounded() -> None:
    now = datetime(2026, 11, 27, 12, tzinfo=timezone.utc)
    nothing = trainer_status(Progress(), {"loss": float("nan")}, now)
    assert nothing == {"metrics": [], "lastUpdatedTime": "2026-11-27T12:00:00Z"}
    many = trainer_status(Progress(done=1.0, left_s=1e12), {f"m{number}": 0.5 for number in range(1000)}, now)
    assert len(many["metrics"]) == MOST_METRICS
    assert (many["progressPercentage"], many["estimatedRemainingSeconds"]) == (100, 2**31 - 1)
