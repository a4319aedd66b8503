"""Tests `tula doctor` and `tula upload` as a user runs them."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from tests.agent.sink import Sink
from tula_agent.commands.doctor import Finding, doctor, examine
from tula_agent.commands.upload import upload, upload_spool
from tula_agent.ship.spool import Spool, SpooledRequest, read_records, spool_files
from tula_agent.ship.transport import Reply

HEALTHY = {"/healthz": 200, "/readyz": 200, "/v1/jobs": 200}


def command(function: object) -> typer.Typer:
    app = typer.Typer()
    app.command()(function)  # type: ignore[type-var]
    return app


def look(environ: dict[str, str]) -> dict[str, Finding]:
    with httpx.Client(timeout=60) as client:
        return {finding.name: finding for finding in examine(environ, client)}


def test_a_clock_apart_from_the_service_is_a_warning() -> None:
    """The simulated service sends a Date header from 2019, since the clock of a real service cannot be set."""
    answers = httpx.MockTransport(lambda _: httpx.Response(200, headers={"date": "Tue, 01 Jan 2019 00:00:00 GMT"}))
    with httpx.Client(transport=answers) as client:
        (clock,) = [found for found in examine({}, client) if found.name == "clock"]
    assert (clock.state, "behind this machine" in clock.found) == ("warning", True)


def test_a_healthy_place_has_nothing_wrong(sink: Sink, tmp_path: Path) -> None:
    sink.pages = dict(HEALTHY)
    found = look({"TULA_URL": sink.url, "TULA_SPOOL_DIR": str(tmp_path / "spool"), "RANK": "0", "WORLD_SIZE": "2"})
    assert {"python", "torch", "distributed", "cuda", "ranks", "service", "clock", "database", "token", "disk"} <= set(
        found
    )
    assert [finding for finding in found.values() if finding.state == "wrong"] == []


@pytest.mark.parametrize(
    ("pages", "environ", "name", "remedy"),
    [
        ({}, {}, "service", "is the address of the service"),
        ({**HEALTHY, "/readyz": 503}, {}, "database", "log"),
        ({**HEALTHY, "/v1/jobs": 401}, {}, "token", "tula token create"),
        (HEALTHY, {"RANK": "4", "WORLD_SIZE": "2"}, "ranks", "0 <= rank < size"),
        (HEALTHY, {"TULA_SPOOL_DIR": "/proc/nowhere"}, "disk", "TULA_SPOOL_DIR"),
    ],
)
def test_each_fault_is_named_with_its_remedy(
    sink: Sink, tmp_path: Path, pages: dict[str, int], environ: dict[str, str], name: str, remedy: str
) -> None:
    sink.pages = dict(pages)
    found = look({"TULA_URL": sink.url, "TULA_SPOOL_DIR": str(tmp_path), **environ})
    assert found[name].state == "wrong"
    assert remedy in found[name].remedy


def test_without_torch_only_torch_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = look({"TULA_SPOOL_DIR": str(tmp_path)})
    assert "pip install 'tula[agent]'" in found["torch"].remedy
    assert "cuda" not in found
    assert "report this" not in {each.remedy for each in found.values()}


def test_doctor_exits_with_one_when_something_is_wrong(tmp_path: Path) -> None:
    environ = {"TULA_URL": "http://127.0.0.1:9", "TULA_SPOOL_DIR": str(tmp_path), "RANK": "", "WORLD_SIZE": ""}
    result = CliRunner().invoke(command(doctor), ["--json"], env=environ)
    assert result.exit_code == 1
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert "start `tula serve`" in findings["service"]["remedy"]
    assert "WRONG" in CliRunner().invoke(command(doctor), [], env=environ).stdout


def test_upload_sends_what_waits_and_keeps_what_is_refused(sink: Sink, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "r-0-boot.spool", 2**20)
    spool.append(SpooledRequest("PATCH", "/v1/runs/r", b'{"state": "succeeded"}'))
    spool.append(SpooledRequest("POST", "/v1/runs/r/samples", b'{"not": "a batch"}', 1))
    result = CliRunner().invoke(command(upload), [str(tmp_path), "--url", sink.url, "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) | {"why": ""} == {"files": 1, "requests": 2, "refused": 1, "left": 0, "why": ""}
    assert sink.states == ["succeeded"]
    (kept,) = tmp_path.iterdir()
    assert [envelope.path for envelope in read_records(kept)] == ["/v1/runs/r", "/v1/runs/r/samples"]
    again = CliRunner().invoke(command(upload), [str(tmp_path), "--url", sink.url])
    assert again.exit_code == 1
    assert "1 request(s) were refused (" in again.stderr
    assert "check TULA_URL and TULA_TOKEN, then upload the requests again or delete their files" in again.stderr


def test_an_upload_without_a_service_loses_nothing(sink: Sink, tmp_path: Path) -> None:
    Spool(tmp_path / "r-0-boot.spool", 2**20).append(SpooledRequest("PATCH", "/v1/runs/r", b'{"state": "succeeded"}'))
    result = CliRunner().invoke(command(upload), [str(tmp_path), "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "start it and try again" in result.output
    assert CliRunner().invoke(command(upload), [str(tmp_path), "--url", sink.url]).exit_code == 0
    assert sink.states == ["succeeded"]


def test_two_uploads_at_once_lose_nothing(tmp_path: Path) -> None:
    """During the first upload, the agent spools another request, which a second upload reads but cannot send."""
    spool = Spool(tmp_path / "r-0-boot.spool", 2**20)
    items = [SpooledRequest("POST", "/v1/runs/r/samples", b'{"n": %d}' % n, 1) for n in range(2)]
    spool.append(items[0])
    sent: list[SpooledRequest] = []

    class Second:
        def send(self, request: SpooledRequest) -> Reply:
            sent.append(request)
            return Reply("delivered" if request == items[0] else "retry", 200)

    class First(Second):
        def send(self, request: SpooledRequest) -> Reply:
            spool.append(items[1])
            upload_spool(tmp_path, Second())  # type: ignore[arg-type]
            return super().send(request)

    upload_spool(tmp_path, First())  # type: ignore[arg-type]
    assert [list(read_records(path)) for path in spool_files(tmp_path)] == [[items[1]]]
    assert sent == [items[0], items[1], items[0]]


def test_upload_of_no_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(command(upload), [str(tmp_path / "nowhere")], standalone_mode=False)  # as `tula` does
    assert "is not a directory" in str(result.exception)


def test_doctor_and_upload_are_sub_commands_of_tula() -> None:
    offered = {point.name: point.value for point in entry_points(group="tula.commands")}
    assert offered["doctor"] == "tula_agent.commands.doctor:doctor"
    assert offered["upload"] == "tula_agent.commands.upload:upload"
