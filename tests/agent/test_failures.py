"""Tests that training ends with the same weights as without the agent, even if the service or the process fails."""

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


def spooled(environment: dict[str, str]) -> list[str]:
    folder = Path(environment["TULA_SPOOL_DIR"])
    return [envelope.path for file in sorted(folder.glob("*.spool")) for envelope in read_records(file)]


def recover_after(sink: Sink, requests: int) -> threading.Thread:
    """Restore the service after this many requests; return the thread that waits for them."""

    def recover() -> None:
        ends = time.monotonic() + 20
        while len(sink.seen) < requests and time.monotonic() < ends:
            time.sleep(0.01)
        sink.behaviour = "ok"

    thread = threading.Thread(target=recover)
    thread.start()
    return thread


def test_a_training_leaves_its_process_as_it_was(sink: Sink, environment: dict[str, str], tmp_path: Path) -> None:
    """The script compares random states, signals, environment, files, folder, threads, settings and hooks.

    The service fails at first, so that the agent also writes its measurements to disk and sends them from there.
    """
    sink.behaviour = "error"
    recovery = recover_after(sink, requests=2)
    (tmp_path / "here").mkdir()
    command = [sys.executable, str(SCRIPTS / "untouched.py"), str(tmp_path / "here")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    recovery.join()
    assert sink.requests, done.stderr
    assert done.stdout.splitlines() == ["looked at 13"]


def test_spooled_requests_are_sent_when_the_service_is_back(sink: Sink, launch: Launch, tmp_path: Path) -> None:
    sink.behaviour = "error"
    recovery = recover_after(sink, requests=4)
    launch("train.py", "--pause", "0.08")
    recovery.join()
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
    assert done.stderr.count("they are stored on disk") == 1
    assert "/v1/runs/run1/samples" in spooled(environment)


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
    """`tula upload` sends what the job could not send, and a second upload changes nothing."""
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
