"""Tests that invalid input and failed commands give one clear sentence each and lose no measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.client.test_cli import Tula, tula
from tula_client import Client

__all__ = ["tula"]

SPEC = """
name = "{name}"
search = "partial"
objective = {objective}
epochs = {epochs}
model = {{ name = "m" }}
dataset = {{ size = {size} }}
cluster = {{ max_nodes = {max_nodes}, price = {{ usd_per_node_hour = {price} }} }}
batch = {{ min_local_batch_size = {batch}, max_local_batch_size = 64 }}
"""
GOOD = {"objective": '"knee"', "epochs": "1", "size": "1000", "max_nodes": "2", "price": "1.0", "batch": "32"}


def spec_file(tmp_path: Path, name: str, **changes: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(SPEC.format(name=name, **(GOOD | changes)))
    return str(path)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("max_nodes", "0", "max_nodes"),
        ("batch", "0", "min_local_batch_size"),
        ("batch", "-3", "min_local_batch_size"),
        ("batch", "100", "swap them"),
        ("objective", '"fastest"', "objective"),
        ("epochs", "nan", "epochs"),
        ("epochs", "inf", "epochs"),
        ("price", "nan", "usd_per_node_hour"),
        ("price", "-1.0", "usd_per_node_hour"),
        ("size", "1.5", "size"),
        ("size", '"many"', "size"),
        ("size", "", "TOML"),
    ],
)
def test_a_wrong_specification_names_its_field(tula: Tula, tmp_path: Path, field: str, value: str, named: str) -> None:
    path = spec_file(tmp_path, tmp_path.name, **{field: value})
    command = [sys.executable, "-c", "pass", "{local_batch_size}", "{num_nodes}"]
    code, _, err = tula("tune", path, "--work-dir", str(tmp_path / "w"), "--", *command)
    assert code == 2
    assert named in err
    assert err.startswith("tula: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; print('no such file'); sys.exit(7)", "exit code 7"),
        ("pass", "tula_agent.init()"),
    ],
)
def test_a_failing_command_is_reported_and_measurements_stay(
    tula: Tula, tmp_path: Path, address: str, program: str, said: str
) -> None:
    path, name = spec_file(tmp_path, tmp_path.name), tmp_path.name
    command = [sys.executable, "-c", program, "{local_batch_size}", "{num_nodes}"]
    code, out, err = tula("tune", path, "--work-dir", str(tmp_path / "w"), "--", *command)
    assert code == 1
    assert said in " ".join(out.split())
    assert "finished measurements are kept" in err
    assert "Traceback" not in err
    with Client(address, token="") as client:
        job = client.handle(name)
        assert {run.state for run in job.runs()} >= {"failed"}
        assert job.recommendation().basis in ("prior", "transfer")


def test_without_a_service_tune_says_so_and_gives_up(tula: Tula, tmp_path: Path) -> None:
    path = spec_file(tmp_path, "no-service")
    command = [sys.executable, "-c", "pass", "{local_batch_size}", "{num_nodes}"]
    code, _, err = tula("--url", "http://127.0.0.1:9", "tune", path, "--", *command)
    assert code == 6
    assert "tula serve" in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--stop-command", "scancel '{launch_id}"], "--stop-command is invalid: no closing quotation"),
        (
            ["--stop-command", "scancel {job}"],
            "is invalid: the command contains the unknown placeholder",
        ),
        (["--stop-command", ""], "--stop-command is invalid"),
        (["--work-dir", __file__], "cannot be used (Not a directory): give another --work-dir"),
    ],
)
def test_a_wrong_option_of_tune_is_one_sentence(tula: Tula, tmp_path: Path, options: list[str], named: str) -> None:
    command = [sys.executable, "-c", "pass", "{local_batch_size}", "{num_nodes}"]
    code, _, err = tula("tune", spec_file(tmp_path, tmp_path.name), *options, "--", *command)
    assert code == 2
    assert named in err
    assert err.startswith("tula: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ('precision = ["fp32", "bf16"]', "the command has no {precision}, but the job tries fp32 and bf16"),
        ('precision = ["fp32"]', "options: precision has fewer than two values"),
        (
            "\n".join(f'o{number} = ["1", "2"]' for number in range(7)),
            "options: these values make 128 combinations, but a job may have at most 64",
        ),
    ],
)
def test_wrong_options_of_a_job_are_one_sentence(tula: Tula, tmp_path: Path, options: str, named: str) -> None:
    path = Path(spec_file(tmp_path, tmp_path.name))
    path.write_text(f"{path.read_text()}[options]\n{options}\n")
    command = [sys.executable, "-c", "raise SystemExit('started')", "{local_batch_size}", "{num_nodes}"]
    code, _, err = tula("tune", str(path), "--work-dir", str(tmp_path / "w"), "--", *command)
    assert code == 2
    assert named in err
    assert err.startswith("tula: ")
    assert err.count("\n") == 1
    assert not list((tmp_path / "w").rglob("*.log"))


def test_an_option_to_vary_that_the_job_lacks_is_one_sentence(tula: Tula, tmp_path: Path) -> None:
    path = Path(spec_file(tmp_path, tmp_path.name))
    command = ["--", sys.executable, "-c", "pass", "{local_batch_size}", "{num_nodes}", "{precision}"]
    for options, choices in (("", "list it under [options] in the job"), ('precision = ["a", "b"]', "use precision")):
        path.write_text(f"{Path(spec_file(tmp_path, tmp_path.name)).read_text()}[options]\n{options}\n")
        code, _, err = tula("tune", str(path), "--only", "compile", *command)
        assert (code, err) == (2, f"tula: --only: 'compile' is not an option of the job: {choices}\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("tune", "job.toml", "python", "train.py", "--bs", "8"), "put -- before your launch command"),
        (
            ("jobs", "edit", "any", "--deadline", "2h"),
            "'2h' is not a number of seconds: for example, write two hours as 7200",
        ),
        (("--url", "127.0.0.1:8393", "jobs", "list"), "url: '127.0.0.1:8393' is not an HTTP address"),
        (
            ("serve", "--database", "/nonexistent/x.db"),
            "The database's folder /nonexistent does not exist: create it",
        ),
    ],
)
def test_a_wrong_command_line_names_its_cause(tula: Tula, words: tuple[str, ...], named: str) -> None:
    code, _, err = tula(*words)
    assert code == 2
    assert named in err
    assert not Path("/nonexistent").exists()


def test_ctrl_c_says_that_the_same_command_continues(tula: Tula, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "handle", interrupted)
    assert tula("run", "any", "--", "true") == (130, "", "tula: stopped; repeat the command to continue\n")


def test_fresh_and_reconfigure_exclude_each_other(tula: Tula) -> None:
    code, _, err = tula("run", "any", "--fresh", "--reconfigure", "--", "true")
    assert code == 2
    assert "mutually exclusive" in err
