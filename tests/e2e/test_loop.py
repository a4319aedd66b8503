"""The whole loop on real input: a service, the command, two processes under torchrun, and what comes of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.forked import Server
from tests.e2e.command import Tula
from tula_client import Client
from tula_wire.precision import FEWEST_STEPS

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_ddp.py"
SPEC = """
name = "digits"
search = "partial"
objective = "time"
[model]
name = "digits-cnn"
[dataset]
size = 1437
[cluster]
min_nodes = 2
max_nodes = 2
price = { usd_per_node_hour = 1.0 }
[batch]
min_local_batch_size = 16
max_local_batch_size = 64
[profiling]
profiling_warmup_steps = 3
measuring_steps = 15
"""


def test_a_spec_becomes_trained_weights_by_way_of_real_measurements(tmp_path: Path, sqlite_url: str) -> None:
    spec = tmp_path / "job.toml"
    spec.write_text(SPEC)
    script = ["--launcher", "torchrun", "--", str(EXAMPLE), "--batch-size", "{local_batch_size}"]
    with Server(sqlite_url) as server, Client(server.url, token="") as client:
        tula = Tula(server, tmp_path, forked=True)
        tuned, _ = tula("tune", str(spec), *script)
        job = client.handle("digits")
        profiled = [run for run in job.runs() if run.kind == "profile"]

        assert {run.state for run in profiled} == {"succeeded"}
        assert {run.configuration.world_size for run in profiled} == {2}
        assert {run.configuration.local_batch_size for run in profiled} >= {16, 64}
        assert all(run.step_time_s is not None and 1e-4 < run.step_time_s < 30 for run in profiled)

        answer = tuned["recommendation"]
        assert answer["basis"] == "profiled"
        # 15 steps of each run arrived, or fewer where they agree so well that the agent ended its batch.
        assert answer["model"]["num_samples"] >= FEWEST_STEPS * len(profiled)
        between = next(one for one in answer["candidates"] if one["configuration"]["local_batch_size"] == 32)
        assert between["step_time_s"]["low"] <= between["step_time_s"]["value"] <= between["step_time_s"]["high"]
        measured = {run.configuration.local_batch_size: run.step_time_s or 0.0 for run in profiled}
        for one in answer["candidates"]:
            seen = measured.get(one["configuration"]["local_batch_size"])
            assert one["profiled"] == (seen is not None)

        (verdict,) = tuned["verdicts"]
        assert verdict["run"] in {run.id for run in profiled if run.configuration.local_batch_size in measured}
        assert client.verdict(verdict["run"]).evidence == verdict["evidence"]

        again, _ = tula("tune", str(spec), *script)
        assert again["recommendation"]["model"]["num_runs"] == len(profiled)
        assert len([run for run in job.runs() if run.kind == "profile"]) == len(profiled)

        tula("run", "digits", *script, "--epochs", "2")
        trained = next(run for run in job.runs() if run.kind == "train")
        assert trained.state == "succeeded"
        assert trained.configuration.local_batch_size == answer["chosen"]["configuration"]["local_batch_size"]
        losses = client.series(trained.id, "loss").values
        steps_an_epoch = 1437 // 2 // trained.configuration.local_batch_size
        assert len(losses) == 2 * steps_an_epoch
        assert all(loss is not None and 0 < loss < 10 for loss in losses)
        assert client.series(trained.id, "validation_accuracy").values
        assert any(entry.run_id == trained.id and entry.measured_step_time_s for entry in client.ledger(job.id).entries)
