"""Whatever happens to the service or to the process, training ends with the weights that it has without the agent."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.conftest import SCRIPTS, Launch
from tests.agent.sink import Sink, start
from tula_agent.ship.spool import read_records

Plain = Callable[..., list[str]]

EXIT_WITHIN_S = 30.0  # the deadline of five seconds, and a very busy machine; a service hangs for sixty


def spooled(environment: dict[str, str]) -> list[str]:
    folder = Path(environment["TULA_SPOOL_DIR"])
    return [envelope.path for file in sorted(folder.glob("*.spool")) for envelope in read_records(file)]


@pytest.mark.parametrize("behaviour", ["error", "garbage", "html", "hang", "trickle", "busy"])
def test_a_service_that_misbehaves_changes_nothing_and_loses_nothing(
    sink: Sink, launch: Launch, plain: Plain, environment: dict[str, str], behaviour: str
) -> None:
    sink.behaviour, sink.retry_after = behaviour, "1"
    weights = plain()
    began = time.monotonic()
    done = launch("train.py")
    assert time.monotonic() - began < EXIT_WITHIN_S
    assert done.printed("weights") == weights
    assert not sink.requests
    paths = spooled(environment)
    assert "/v1/runs/run1/samples" in paths
    assert "/v1/runs/run1/telemetry" in paths
    assert paths[-1] == "/v1/runs/run1"  # how it ended, last


@pytest.mark.parametrize("behaviour", ["ok", "error"])
def test_a_training_leaves_its_process_as_it_was(
    sink: Sink, environment: dict[str, str], tmp_path: Path, behaviour: str
) -> None:
    """Random states, signals, environment, files, folder, threads, settings and hooks; with all that is imported."""
    sink.behaviour = behaviour
    (tmp_path / "here").mkdir()
    command = [sys.executable, str(SCRIPTS / "untouched.py"), str(tmp_path / "here")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert sink.seen, done.stderr
    assert done.stdout.splitlines() == ["looked at 13"]


def test_a_service_that_is_not_there_changes_nothing(launch: Launch, plain: Plain, environment: dict[str, str]) -> None:
    done = launch("train.py", TULA_URL="http://127.0.0.1:9")
    assert done.printed("weights") == plain()
    assert "/v1/runs/run1/samples" in spooled(environment)


def test_spooled_requests_are_sent_when_the_service_is_back(sink: Sink, launch: Launch, tmp_path: Path) -> None:
    sink.behaviour = "error"

    def recover() -> None:
        ends = time.monotonic() + 20
        while len(sink.seen) < 4 and time.monotonic() < ends:
            time.sleep(0.01)
        sink.behaviour = "ok"

    thread = threading.Thread(target=recover)
    thread.start()
    launch("train.py", "--pause", "0.08")
    thread.join()
    assert sink.steps() == list(range(64))
    assert sink.states[-1] == "succeeded"
    assert not list((tmp_path / "spool").glob("*"))


def test_refused_requests_are_counted_said_once_and_not_retried(
    sink: Sink, launch: Launch, plain: Plain, tmp_path: Path
) -> None:
    sink.behaviour = "refuse"
    done = launch("train.py")
    assert done.printed("weights") == plain()
    assert done.stderr.count("the service refused") == 1
    assert "measurements were dropped" in done.stderr
    posts = [path for method, path in sink.seen if method == "POST"]
    assert 0 < len(posts) < 12
    assert not list((tmp_path / "spool").glob("*"))


def test_what_a_wrong_token_can_not_send_waits_on_disk(sink: Sink, launch: Launch, environment: dict[str, str]) -> None:
    sink.behaviour = "unknown_token"
    done = launch("train.py")
    assert done.stderr.count("they wait on disk") == 1
    assert "/v1/runs/run1/samples" in spooled(environment)


def test_a_full_disk_changes_nothing_and_the_loss_is_counted(sink: Sink, launch: Launch, plain: Plain) -> None:
    sink.behaviour = "error"
    # /dev/full answers every write with ENOSPC; a directory below it cannot even be made.
    done = launch("train.py", TULA_SPOOL_DIR="/dev/full/spool")
    assert done.printed("weights") == plain()
    assert "measurements were dropped" in done.stderr


@pytest.mark.parametrize(
    ("what", "status"),
    [("raise", 1), ("leave", 3), ("oom", 1), ("exit", 7), ("term", -signal.SIGTERM), ("kill", -signal.SIGKILL)],
)
def test_a_job_that_ends_badly_ends_as_it_would_without_the_agent(
    sink: Sink, launch: Launch, what: str, status: int
) -> None:
    arguments = ("--pause", "0.03", "--at", f"50:{what}")
    without = launch("train.py", *arguments, expect=status, TULA_DISABLED="1")
    done = launch("train.py", *arguments, expect=status)
    assert done.printed("weights") == without.printed("weights")
    assert [line for line in done.stderr.splitlines() if line.startswith(("ValueError", "RuntimeError"))] == [
        line for line in without.stderr.splitlines() if line.startswith(("ValueError", "RuntimeError"))
    ]
    if what == "raise":
        assert sink.states == ["running", "failed"]
        assert sink.bodies("/run1")[-1]["message"] == "ValueError: on purpose"
        assert sink.steps()[-1] == 49
    elif what == "leave":
        assert sink.states == ["running", "failed"]
    elif what == "oom":
        assert sink.states == ["running", "out_of_memory"]
        assert sink.bodies("/run1")[-1]["failed_local_batch_size"] == 8
    else:
        # No hook runs before such an end: everything until about a second before it was sent.
        assert sink.states == ["running"]
        assert sink.steps()[:10] == list(range(10))


def test_a_clock_that_jumps_a_day_back_changes_no_time(sink: Sink, launch: Launch, plain: Plain) -> None:
    done = launch("train.py", "--pause", "0.02", "--at", "30:clock")
    assert done.printed("weights") == plain("--pause", "0.02", "--at", "30:clock")
    assert sink.steps() == list(range(64))
    times = [time for body in sink.samples for time in body["step_time_s"]]
    assert all(0.015 < time < 5 for time in times)


def test_a_fork_while_the_queue_is_full_sends_nothing_twice(sink: Sink, launch: Launch, plain: Plain) -> None:
    sink.behaviour = "hang"
    done = launch("train.py", "--at", "40:fork", "--pause", "0.01")
    assert done.printed("weights") == plain("--pause", "0.01")
    assert len(sink.seen) <= 2  # the parent's one request at a time, and none of the child's


def test_a_full_queue_drops_the_newest_rows_and_says_how_many() -> None:
    from tula_agent.readings import Readings, StepTiming

    readings = Readings(limit=10)
    for step in range(25):
        readings.add_step(StepTiming(step, 0.1, 0.0, 1, 8, False), warmup=False)
    assert [timing.step for timing, _, _ in readings.steps] == list(range(10))
    assert readings.dropped == 15


def test_the_same_run_is_whole_when_the_service_starts_late(launch: Launch, tmp_path: Path) -> None:
    """`tula upload` finishes what the job could not deliver, and a second upload changes nothing."""
    launch("train.py", TULA_URL="http://127.0.0.1:9")
    late = Sink()
    server = start(late)
    try:
        from tula_agent.commands.upload import upload_spool
        from tula_agent.ship.transport import Transport

        transport = Transport(late.url, None, 5.0)
        done = upload_spool(tmp_path / "spool", transport)
        again = upload_spool(tmp_path / "spool", transport)
        transport.close()
    finally:
        server.shutdown()
        server.server_close()
    assert (done.files, done.refused, done.left) == (1, 0, 0)
    assert (again.files, again.requests) == (0, 0)
    assert late.steps() == list(range(64))
    assert late.states == ["succeeded"]
    assert not late.invalid
