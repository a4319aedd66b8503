"""`tula import`: stored once however often it is sent, and refused by the line that is wrong before anything is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.client.test_cli import Tula, answer, tula
from tula_client import Client, TulaError
from tula_wire import JobSpec

__all__ = ["tula"]


def test_steps_measured_elsewhere_lead_to_a_recommendation(
    tula: Tula, address: str, spec: JobSpec, csv_file: Path
) -> None:
    with Client(address, token="") as client:
        job = client.register(spec).job.id
    first = answer(tula("import", job, str(csv_file), "--json"))
    assert (first["rows"], first["new"], len(first["runs"])) == (48, 48, 4)
    again = answer(tula("import", job, str(csv_file), "--json"))
    assert (again["runs"], again["new"], again["known"]) == (first["runs"], 0, 48)
    assert tula("import", job, str(csv_file))[1].startswith("0 new steps, 48 known before, of 4 configurations: ")
    found = answer(tula("recommend", job, "--json"))
    assert (found["basis"], found["model"]["num_samples"]) == ("profiled", 48)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "num_nodes: is required; add it. local_batch_size: is required; add it. step_time_s: is required"),
        ("num_nodes,local_batch_size,step_time\n1,2,3\n", "step_time: is not known"),
        ("num_nodes,local_batch_size,step_time_s\n", "no measurements"),
        ("num_nodes,local_batch_size,step_time_s\n1,32\n", "line 2: give 3 values"),
        ("num_nodes,local_batch_size,step_time_s\n1,32,1,1\n", "line 2: give 3 values"),
        ("num_nodes,local_batch_size,step_time_s\n0,32,1\n", "line 2: num_nodes"),
        ("num_nodes,local_batch_size,step_time_s\n1,32,nan\n", "line 2: step_time_s: is NaN or infinite"),
        ("num_nodes,local_batch_size,step_time_s\n1,32,0\n", "line 2: step_time_s: must be above 0"),
        ("num_nodes,local_batch_size,step_time_s\n1,32,fast\n", "line 2: step_time_s: must be a number; give one"),
        ("num_nodes,local_batch_size,step_time\n1,32,1\n", "step_time: is not known; did you mean step_time_s?"),
        ("num_nodes,num_nodes,local_batch_size,step_time_s\n1,1,32,1\n", "num_nodes: stands there twice"),
        (
            "num_nodes,local_batch_size,step_time_s\n1,32,1\n1,64,1\n1,32,2e6\n",
            "line 4: step_time_s: must be at most 1000000.0; give a smaller value, or remove the line",
        ),
        ("num_nodes,local_batch_size,step_time_s,input_time_s\n1,32,1,\n1,32,1,1e9\n", "line 3: input_time_s: must be"),
        (
            "num_nodes,local_batch_size,step_time_s,peak_bytes\n1,32,1,9\n1,32,1,1e30\n1,32,1,8\n",
            "line 3: peak_bytes: must be at most 1.152921504606847e+18; give a smaller value",
        ),
        (
            "num_nodes,local_batch_size,step_time_s\n" + "1,32,1\n" * 10_000 + "1,32,1e7\n",
            "line 10002: step_time_s: must be at most",
        ),
        (
            "num_nodes,local_batch_size,step_time_s\n1,32,1\n1e3,32,1\n",
            "line 3: num_nodes: must be a whole number; give one",
        ),
        ("num_nodes,local_batch_size,step_time_s\n3000000000,32,1\n", "line 2: num_nodes: must be at most 2147483647;"),
        (
            "num_nodes,local_batch_size,step_time_s\n1,32,1\n1,32,1\n8,32,1\n",
            "line 4: num_nodes: 8 is more than the job's max_nodes of 4: correct the line or remove it",
        ),
        (
            "num_nodes,local_batch_size,step_time_s\n1,512,1\n",
            "line 2: local_batch_size: 512 is above the job's maximum of 256: correct the line or remove it",
        ),
        (
            "num_nodes,local_batch_size,step_time_s,instance_type\n1,32,1,g5\n",
            "line 2: instance_type: the job has no 'g5': use default",
        ),
    ],
)
def test_a_wrong_file_is_explained_and_nothing_is_stored(
    tula: Tula, address: str, spec: JobSpec, tmp_path: Path, text: str, said: str
) -> None:
    with Client(address, token="") as client:
        job = client.register(spec).job.id
        path = tmp_path / "wrong.csv"
        path.write_text(text)
        code, _, err = tula("import", job, str(path))
        assert code == 2
        assert said in err
        runs = client.runs(job, kind="profile").runs
        assert {(run.state, run.num_samples) for run in runs} == {("pending", 0)}  # as planned when it was registered


def test_an_import_that_breaks_off_leaves_no_run_that_others_wait_for(
    tula: Tula, address: str, spec: JobSpec, csv_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TulaError("the line is cut")

    with Client(address, token="") as client:
        job = client.register(spec).job.id
        monkeypatch.setattr(Client, "send_samples", refuse)
        code, _, err = tula("import", job, str(csv_file))
        assert (code, err) == (1, "tula: the line is cut\n")
        own = [run for run in client.runs(job).runs if run.method is not None]
        assert [run.state for run in own] == ["cancelled"]
        monkeypatch.undo()
        monkeypatch.setenv("TULA_URL", address)
        assert answer(tula("import", job, str(csv_file), "--json"))["new"] == 48
        assert client.recommendation(job).model.num_samples == 48
