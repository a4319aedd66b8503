"""Tests the `tula` command with the real service: its output, its JSON, and its failures."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.client.conftest import job_spec
from tests.client.test_client import profile, steps
from tula_client import Client
from tula_client._settings import package_version
from tula_client.cli import app, jobs, output
from tula_client.cli.app import run
from tula_wire import Event, Job, JobPage, JobSpec, RunCreate, RunPatch
from tula_wire.format import percent
from tula_wire.text import printable

Tula = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tula(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tula:
    """Return a function that runs a command line in this process and returns its exit code, output and errors."""
    monkeypatch.setenv("TULA_URL", request.getfixturevalue("address"))
    monkeypatch.delenv("TULA_TOKEN", raising=False)

    def call(*words: str) -> tuple[int, str, str]:
        code = run([str(word) for word in words])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def profiled(address: str) -> Job:
    """Return a profiled job that tests read but do not change."""
    with Client(address, token="") as client:
        made = client.register(job_spec("only read")).job
        profile(client, made.id)
        return made


@pytest.fixture
def job(address: str, spec: JobSpec) -> str:
    """Return the id of a profiled job that the test may change."""
    with Client(address, token="") as client:
        made = client.register(spec).job
        profile(client, made.id)
        return made.id


def answer(result: tuple[int, str, str]) -> Any:
    code, out, err = result
    assert (code, err) == (0, "")
    return json.loads(out)


def test_recommend_answers_people_and_programs(tula: Tula, profiled: Job) -> None:
    assert answer(tula("recommend", profiled.id, "--objective", "time", "--json"))["objective"] == "time"
    code, out, err = tula("recommend", profiled.name)
    assert (code, err) == (0, "")
    assert "Recommended: " in out
    assert "knee" in out.lower()
    assert len(out.splitlines()) < 20
    _, with_table, _ = tula("recommend", profiled.id, "--candidates")
    assert sum(line.lstrip()[:1].isdigit() for line in with_table.splitlines()) >= 12


def test_jobs_list_and_show_print_a_job(tula: Tula, profiled: Job) -> None:
    page = answer(tula("jobs", "list", "--search", profiled.name, "--json"))
    assert [one["id"] for one in page["jobs"]] == [profiled.id]
    printed = answer(tula("jobs", "show", profiled.name, "--json"))
    assert {run["state"] for run in printed["runs"]} == {"succeeded"}
    _, out, _ = tula("jobs", "show", profiled.id)
    assert profiled.id in out
    assert "profile" in out
    assert "the smallest batch" in out
    assert "the largest" in out
    _, out, _ = tula("jobs", "list", "--search", profiled.name, "--limit", "1")
    assert profiled.id in out
    _, out, _ = tula("jobs", "list", "--search", "no such name")
    assert "tula tune" in out


def test_runs_are_listed_with_measured_and_predicted_step_times(tula: Tula, profiled: Job) -> None:
    listed = answer(tula("runs", profiled.name, "--json"))
    assert {run["state"] for run in listed} == {"succeeded"}
    _, out, _ = tula("runs", profiled.id)
    assert all(run["id"] in out for run in listed)


def test_predict_answers_for_every_combination(tula: Tula, profiled: Job) -> None:
    words = ("predict", profiled.id, "--nodes", "1", "--nodes", "2", "--batch", "64", "--price", "9", "--json")
    found = answer(tula(*words))["candidates"]
    assert [one["configuration"]["num_nodes"] for one in found] == [1, 2]
    for one in found:
        dollars = 9 * one["configuration"]["num_nodes"] * one["total_time_s"]["value"] / 3600
        assert one["cost_usd"]["value"] == pytest.approx(dollars, rel=0.01)
    code, out, err = tula("predict", profiled.id, "--nodes", "1", "--batch", "64")
    assert (code, err) == (0, "")
    assert "Based on measurements of this job" in out
    assert tula("predict", profiled.id, "--nodes", "0")[0] == 2
    code, _, err = tula("predict", profiled.id, "--option", "precision=bf16")
    assert (code, "This job has no option 'precision'" in err) == (2, True)


def test_edit_changes_objective_limits_and_prices_and_keeps_the_other_limits(tula: Tula, job: str) -> None:
    assert answer(tula("jobs", "edit", job, "--deadline", "900", "--json"))["job_id"] == job
    assert tula("jobs", "edit", job, "--objective", "cost", "--budget", "5", "--price", "2.5")[0] == 0
    spec = answer(tula("jobs", "show", job, "--json"))["spec"]
    assert (spec["objective"], spec["limits"]["deadline_s"], spec["limits"]["budget_usd"]) == ("cost", 900, 5)
    assert spec["cluster"][0]["price"]["usd_per_node_hour"] == 2.5
    assert tula("jobs", "edit", job, "--deadline", "0")[0] == 0
    assert answer(tula("jobs", "show", job, "--json"))["spec"]["limits"]["deadline_s"] is None
    for words, said in (((), "nothing to change"), (("--price", "p4d=2"), "p4d=2"), (("--price", "x"), "'x'")):
        code, out, err = tula("jobs", "edit", job, *words)
        assert (code, out) == (2, "")
        assert said in err


def test_scaling_can_be_seen_and_set(tula: Tula, job: str) -> None:
    assert answer(tula("scaling", "set", job, "delta=0.25", "--policy", "ags", "--json"))["delta"] == 0.25
    _, out, _ = tula("scaling", "show", job, "--policy", "ags")
    assert [line.split()[1] for line in out.splitlines() if line.startswith(("policy", "delta"))] == ["ags", "0.25"]
    assert answer(tula("scaling", "set", job, "delta=null", "--policy", "ags", "--json"))["delta"] is None
    for word, said in (
        ("speed=9", "speed=9"),
        ("delta", "NAME=VALUE"),
        ("delta=-1", "delta"),
    ):
        code, out, err = tula("scaling", "set", job, word)
        assert (code, out) == (2, "")
        assert said in err


def test_open_prints_the_address_of_the_page(tula: Tula, profiled: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("typer.launch", opened.append)
    _, out, _ = tula("open", profiled.name)
    assert tula("open")[0] == 0
    assert out.strip().endswith(f"/jobs/{profiled.id}")
    assert opened == [out.strip(), out.strip().removesuffix(f"jobs/{profiled.id}")]


def test_logs_prints_the_newest_output_of_a_run_without_control_characters(tula: Tula, tmp_path: Path) -> None:
    folder = tmp_path / "job-1" / "logs"
    folder.mkdir(parents=True)
    for number, text in enumerate(("first start", "second start\x1b[2J")):
        log = folder / f"run-1-{number:06x}.log"
        log.write_text(f"{text}\n")
        os.utime(log, (number, number))
    assert tula("logs", "run-1", "--work-dir", str(tmp_path))[1] == f"{printable('second start' + chr(27) + '[2J')}\n"
    code, out, err = tula("logs", "run-9", "--work-dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert "--work-dir" in err


@pytest.mark.parametrize(("total", "said"), [(999, "1 of 999 jobs"), (1000, "1 of 1000+ jobs")])
def test_a_total_that_was_not_counted_to_its_end_says_so(total: int, said: str) -> None:
    listed: dict[str, Any] = {"id": "job-1", "name": "net", "model_name": "net", "state": "ready", "objective": "knee"}
    listed |= {"created_at": "2026-01-01T00:00:00Z", "runs_done": 3, "runs_planned": 3}
    page = JobPage.model_validate({"jobs": [listed], "total": total, "next_cursor": "7"})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(jobs.list_view(page))
    assert said in capture.get()


def test_a_job_shows_predictions_beside_measurements(tula: Tula, job: str, address: str) -> None:
    with Client(address, token="") as client:
        answer_ = client.recommendation(job)
        assert answer_.chosen is not None
        wanted = RunCreate(kind="train", configuration=answer_.chosen.configuration, holder="test")
        training = client.create_run(job, wanted)
        client.patch_run(training.id, RunPatch(state="running", holder="test"))
        client.send_samples(training.id, steps(training))
        client.patch_run(training.id, RunPatch(state="succeeded", holder="test"))
    printed = answer(tula("jobs", "show", job, "--json"))
    (kept,) = [entry for entry in printed["ledger"] if entry["run_id"] == training.id]
    promised, measured = kept["predicted_step_time_s"], kept["measured_step_time_s"]
    assert kept["recommendation_id"] == answer_.id
    assert kept["error"] == pytest.approx(measured / promised["value"] - 1)
    assert kept["within_interval"] is (promised["low"] <= measured <= promised["high"])
    # Each carries the prediction of the moment at which it was claimed, the first that from its hardware.
    profiled = sorted((run for run in printed["runs"] if run["kind"] == "profile"), key=lambda run: run["finished_at"])
    assert all(run["predicted_step_time_s"] for run in profiled)
    _, out, _ = tula("jobs", "show", job)
    assert "relative to the prediction" in out
    line = next(line for line in out.splitlines() if answer_.id in line)
    assert training.id in line
    assert percent(kept["error"], signed=True) in line


def test_archive_and_delete(tula: Tula, job: str) -> None:
    assert answer(tula("jobs", "archive", job, "--json"))["state"] == "archived"
    code, _, err = tula("jobs", "delete", job, "--json")
    assert (code, err.count("\n")) == (2, 1)
    assert "--yes" in err
    assert answer(tula("jobs", "delete", job, "--yes", "--json")) == {"deleted": job}
    assert tula("jobs", "show", job)[0] == 5


def test_plots_are_pictures(tula: Tula, profiled: Job, tmp_path: Path) -> None:
    for name, begins in (("a.png", b"\x89PNG"), ("a.svg", b"<svg"), ("a.json", b"{")):
        assert answer(tula("plot", profiled.id, "--output", str(tmp_path / name), "--json"))["written"]
        assert (tmp_path / name).read_bytes().startswith(begins)
    assert tula("plot", profiled.id, "--quantity", "cost", "--output", str(tmp_path / "cost.json"))[0] == 0
    assert "cost" in json.loads((tmp_path / "cost.json").read_text())["title"]["text"]
    code, _, err = tula("plot", profiled.id, "--output", str(tmp_path / "a.gif"))
    assert code == 2
    assert ".png, .svg, .json" in err
    assert tula("plot", profiled.id, "--chart", "nothing", "--output", str(tmp_path / "b.png"))[0] == 5


def test_tables_come_out_as_csv_parquet_and_json(tula: Tula, profiled: Job, tmp_path: Path) -> None:
    code, out, _ = tula("export", profiled.id)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert {row["num_nodes"] for row in rows} == {"1", "2", "4"}
    assert [row["chosen"] for row in rows].count("True") == 1
    assert len(answer(tula("export", profiled.id, "--json"))) == len(rows)
    parquet = tmp_path / "runs.parquet"
    assert answer(tula("export", profiled.id, "--table", "runs", "--output", str(parquet), "--json"))["rows"] >= 3
    import pandas

    assert set(pandas.read_parquet(parquet)["state"]) == {"succeeded"}
    assert answer(tula("export", profiled.id, "--table", "ledger", "--json"))
    code, _, err = tula("export", profiled.id, "--output", str(tmp_path / "x.xlsx"))
    assert (code, ".parquet" in err) == (2, True)


def test_a_recommendation_on_spot_capacity_says_so(tula: Tula, address: str) -> None:
    price = {"usd_per_node_hour": 3.0, "spot": {"usd_per_node_hour": 1.0, "interruptions_per_node_hour": 0.01}}
    plain = job_spec("on spot").model_dump(mode="json")
    plain["cluster"][0]["price"] = price
    with Client(address, token="") as client:
        job = client.register(JobSpec.model_validate(plain)).job.id
    code, out, err = tula("recommend", job, "--objective", "cost", "--candidates")
    assert (code, err) == (0, "")
    assert re.search(r"Recommended: .*, spot", out), out


def test_watch_prints_an_event_a_line_and_no_control_character(
    tula: Tula, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(timezone.utc)
    happened = [
        Event(id=number, job_id=job, kind="run", at=now, run_id="run-1", data={"state": "failed", "message": message})
        for number, message in enumerate(("No memory.", "\x1b]0;pwn\x07 \u202egnp.exe"), 1)
    ]
    monkeypatch.setattr(Client, "events", lambda *_, **__: iter(happened))
    code, out, err = tula("watch", job)
    assert (code, err, out.count("\n")) == (0, "", 2)
    assert "run run-1: failed: No memory." in out
    assert all(letter.isprintable() for letter in out.replace("\n", ""))
    lines = tula("watch", job, "--json")[1].splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 2]


def test_an_event_line_ends_with_its_sentence() -> None:
    drift = {"alarm": "slower", "step": 39, "sentence": "Training has become slower than predicted."}
    for kind, data, text in (
        ("drift", drift, "drift: Training has become slower than predicted."),
        ("job", {"state": "ready", "plan_reason": "The choice is stable."}, "job: ready: The choice is stable."),
        ("samples", {"num_samples": 40}, "samples: num samples 40"),
        ("run", {"state": "out_of_memory"}, "run: out of memory"),
    ):
        event = Event.model_validate({"id": 1, "kind": kind, "job_id": "j", "at": "2026-01-01T00:00:00Z", "data": data})
        assert jobs.event_line(event).endswith(text)


def test_version_prints_the_version(tula: Tula) -> None:
    assert tula("--version") == (0, f"tula {package_version()}\n", "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["recommend", "nowhere"], 5, "tula jobs list"),
        (["recommend"], 2, "JOB"),
        (["recommend", ""], 5, "JOB"),
        (["recommend", "x", "--objective", "speed"], 2, "--objective"),
        (["nonsense"], 2, "nonsense"),
        (["jobs", "list", "--limit", "0"], 2, "--limit"),
        (["--url", "http://127.0.0.1:9", "jobs", "list"], 6, "tula serve"),
        (["--url", "elsewhere", "jobs", "list"], 2, "url: 'elsewhere' is not an HTTP address"),
    ],
)
def test_a_failure_is_one_sentence_and_its_exit_code(tula: Tula, words: list[str], code: int, said: str) -> None:
    found, out, err = tula(*words)
    assert found == code
    assert out == ""
    assert err.startswith("tula: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_wrong_token_is_denied(tula: Tula, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TULA_TOKEN", "wrong")
    code, _, err = tula("jobs", "list")
    assert code == 4
    assert err.count("\n") == 1


def test_a_broken_plug_in_harms_only_itself(tula: Tula, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {
        "doctor": EntryPoint("doctor", "tula_agent.no_such_module:doctor", app.GROUP),
        "odd": EntryPoint("odd", "json:no_such_function", app.GROUP),
    }
    monkeypatch.setattr(app, "plugins", lambda: broken)
    assert tula("--version")[0] == 0
    code, _, err = tula("doctor", "--any", "argument")
    assert code == 1
    assert "pip install 'tula[agent]'" in err
    assert "reinstall json" in tula("odd")[2]
    assert "doctor" in tula("--help")[1]


def test_help_needs_no_service_and_names_the_exit_codes(tula: Tula) -> None:
    code, out, _ = tula("--help")
    assert code == 0
    assert "6 service unreachable" in " ".join(out.split())


def test_help_prints_words_in_brackets(tula: Tula) -> None:
    code, out, _ = tula("estimate", "--help")
    assert code == 0
    assert "[model]" in out


def test_no_text_of_the_service_steers_the_terminal(tula: Tula, job: str, address: str) -> None:
    """A message from an agent once set the title of the operator's terminal or reordered the line."""
    with Client(address, token="") as client:
        (made, *_) = client.runs(job).runs
        made = client.create_run(job, RunCreate(kind="train", configuration=made.configuration, holder="me"))
        evil = "\x1b]0;pwn\x07 \x00 \x9b31m \u202egnp.exe\u2066\n2 line"
        client.patch_run(
            made.id, RunPatch.model_construct({"state", "message", "holder"}, state="failed", message=evil, holder="me")
        )
        assert "pwn" in str(client.run(made.id).message)
    for words in (["jobs", "show", job], ["jobs", "show", job, "--json"]):
        code, out, err = tula(*words)
        assert (code, err) == (0, "")
        assert "pwn" in out
        assert all(letter.isprintable() for letter in out.replace("\n", "")), words


def test_the_console_writes_its_styles_and_no_control_character_of_a_text(capfd: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b]0;pwn\x07\x9b1m\u202eb"
    output.emit({"x": evil}, output.table(["x"], [[evil]]), False)
    output.emit({"x": evil}, evil, False)
    text = capfd.readouterr().out
    assert text.count("]0;pwn") == 2
    assert all(letter.isprintable() for letter in text.replace("\n", ""))
    output.emit({"x": evil}, "", True)
    assert json.loads(text := capfd.readouterr().out) == {"x": evil}
    assert all(letter.isprintable() for letter in text.replace("\n", ""))


def test_every_wrong_field_of_a_job_has_a_line_without_a_control_character(tula: Tula, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'name = "x"\n"\\u001b[2J" = 1\n[model]\nname = "m"\n[dataset]\nsize = -1\n[cluster]\nmax_nodes = 1\n'
    )
    code, out, err = tula("jobs", "add", str(path))
    assert (code, out) == (2, "")
    first, *fields = err.splitlines()
    assert first == f"tula: {path}: 2 fields are wrong:"
    assert [line.split(":")[0] for line in fields] == ["  dataset.size", "  \ufffd[2J"]
