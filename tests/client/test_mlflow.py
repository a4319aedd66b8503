"""Tests that `tula export --to mlflow` stores runs in a real MLflow store, and that a second export updates them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.client.test_cli import Tula, answer, job, profiled, tula
from tula_client import Client
from tula_wire import Configuration, Job, RunCreate, RunPatch, TelemetryChunk

__all__ = ["job", "profiled", "tula"]

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, of the libraries that it uses


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the address of an empty MLflow store in a file."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_LOGGING_LEVEL", "ERROR")
    return uri


def test_runs_come_out_with_parameters_metrics_and_tags(tula: Tula, address: str, job: str, store: str) -> None:
    from mlflow import MlflowClient

    chosen = Configuration(num_nodes=2, local_batch_size=64)
    with Client(address, token="") as client:
        run = client.create_run(job, RunCreate(kind="train", configuration=chosen, holder="me"))
        client.patch_run(run.id, RunPatch(state="running", holder="me"))
        chunk = TelemetryChunk(boot_id="b", sequence=0, steps=[0, 1, 2], columns={"loss": [2.0, None, 0.5]})
        client.send_telemetry(run.id, chunk)
        count = len(client.handle(job).runs())
        measured = next(one for one in client.handle(job).runs() if one.state == "succeeded")
    done = answer(tula("export", job, "--to", "mlflow", "--json"))
    assert done["runs"] == count
    reader = MlflowClient(store)
    experiment = reader.get_experiment_by_name(done["experiment"])
    found = {one.info.run_name: one for one in reader.search_runs([experiment.experiment_id])}
    training, profile = found[run.id], found[measured.id]
    assert training.info.status == "RUNNING"
    assert (training.data.params["num_nodes"], training.data.params["global_batch_size"]) == ("2", "128")
    points = reader.get_metric_history(training.info.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(0, 2.0), (2, 0.5)]
    assert training.data.metrics["predicted_cost_usd"] > 0
    assert (profile.info.status, profile.data.tags["tula.kind"]) == ("FINISHED", "profile")
    assert profile.data.metrics["mean_step_time_s"] == measured.step_time_s
    assert len(reader.get_metric_history(profile.info.run_id, "step_time_s")) == 12

    with Client(address, token="") as client:
        client.patch_run(run.id, RunPatch(state="failed", message="It broke.", holder="me"))
    code, out, _ = tula("export", job, "--to", "mlflow")
    assert (code, out) == (0, f"Wrote {count} runs to the MLflow experiment {done['experiment']!r}.\n")
    assert len(reader.search_runs([experiment.experiment_id])) == count
    again = reader.get_run(training.info.run_id)
    assert (again.info.status, again.data.tags["tula.message"]) == ("FAILED", "It broke.")
    assert len(reader.get_metric_history(training.info.run_id, "loss")) == 2


def test_a_refused_export_says_why_in_one_sentence(tula: Tula, profiled: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = tula("export", profiled.id, "--to", "mlflow", "--table", "runs")
    assert (code, "omit --output and --table" in err) == (2, True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    code, _, err = tula("export", profiled.id, "--to", "mlflow")
    assert code == 1
    assert "the runs could not be written to MLflow: " in err
    assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "mlflow", None)
    code, _, err = tula("export", profiled.id, "--to", "mlflow")
    assert (code, "pip install 'tula[mlflow]'" in err) == (1, True)
