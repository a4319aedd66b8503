"""Tests that, if the service or a rank fails, the weights after each DDP step are the same as without the agent.

Two ranks over gloo print a digest of their weights after every step; the reference is one run without the agent.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from tests.agent.conftest import Done, Launch
from tests.agent.sink import Sink, start
from tula_agent.commands.upload import upload_spool
from tula_agent.ship.spool import read_records
from tula_agent.ship.transport import Transport

STEPS = 64
EXIT_WITHIN_S = 30.0  # the deadline of five seconds, and a very busy machine; a service hangs for sixty
_reference: dict[tuple[int, int], str] = {}


def traced(done: Done) -> dict[tuple[int, int], str]:
    """Return the digests of the weights by (rank, step)."""
    lines = [line.split() for line in done.printed("step ")]
    return {(int(rank), int(step)): digest for _, step, rank, digest in lines}


@pytest.fixture
def reference(launch: Launch) -> dict[tuple[int, int], str]:
    """Return the digests of a run without an agent."""
    if not _reference:
        _reference.update(traced(launch("train.py", "--trace", ranks=2, TULA_URL="")))
    assert len(_reference) == 2 * STEPS
    assert len(set(_reference.values())) == STEPS  # the ranks agree, and every step changes something
    return _reference


def spooled(environment: dict[str, str]) -> list[str]:
    """Return the paths of the first rank's requests that wait on disk, in order."""
    folder = Path(environment["TULA_SPOOL_DIR"])
    return [request.path for file in sorted(folder.glob("run1-0-*.spool")) for request in read_records(file)]


@pytest.mark.parametrize("behaviour", ["ok", "error", "garbage", "html", "hang", "trickle", "busy", "refuse", "away"])
def test_a_service_that_misbehaves_changes_no_step_and_loses_nothing(
    sink: Sink,
    launch: Launch,
    reference: dict[tuple[int, int], str],
    environment: dict[str, str],
    behaviour: str,
) -> None:
    sink.behaviour, sink.retry_after = behaviour, "1"
    url = "http://127.0.0.1:9" if behaviour == "away" else sink.url
    began = time.monotonic()
    assert traced(launch("train.py", "--trace", ranks=2, TULA_URL=url)) == reference
    assert time.monotonic() - began < EXIT_WITHIN_S
    assert bool(sink.seen) == (behaviour != "away")
    assert bool(sink.requests) == (behaviour == "ok")
    paths = spooled(environment)
    if behaviour in ("ok", "refuse"):
        assert not paths
    else:
        assert {"/v1/runs/run1/samples", "/v1/runs/run1/telemetry"} <= {*paths}
        assert paths[-1] == "/v1/runs/run1"  # how it ended, last


def test_a_disk_that_takes_nothing_changes_no_step(
    sink: Sink, launch: Launch, reference: dict[tuple[int, int], str]
) -> None:
    sink.behaviour = "error"
    done = launch("train.py", "--trace", ranks=2, TULA_SPOOL_DIR="/dev/full/spool")
    assert traced(done) == reference
    assert "measurements were dropped" in done.stderr


def test_a_disk_that_fills_up_in_a_write_changes_no_step_and_leaves_no_half_record(
    sink: Sink, launch: Launch, reference: dict[tuple[int, int], str], tmp_path: Path
) -> None:
    sink.behaviour = "error"
    done = launch("train.py", "--trace", "--at", "0:small-disk", ranks=2)
    assert traced(done) == reference
    assert "measurements were dropped" in done.stderr
    files = list((tmp_path / "spool").glob("*.spool"))
    assert files
    assert [path.read_bytes() for path in files] == [b""] * len(files)  # what came to disk by half is taken back


@pytest.mark.parametrize(
    ("what", "status", "who"),
    [
        ("raise", 1, 1),
        ("leave", 3, 1),
        ("kill", -signal.SIGKILL, 1),
        ("exit", 7, 0),
    ],
)
def test_a_rank_that_ends_does_so_with_the_weights_of_its_last_step(
    sink: Sink, launch: Launch, reference: dict[tuple[int, int], str], what: str, status: int, who: int
) -> None:
    done = launch("train.py", "--trace", "--at", f"20:{what}", "--who", str(who), ranks=2, expect=None)
    assert done.codes[who] == status
    assert done.codes[1 - who] != 0  # its peer is gone
    assert traced(done) == {at: digest for at, digest in reference.items() if at[1] < 20}
    assert who == 0 or sink.states[-1] == "failed"


def test_kill_in_the_middle_of_a_write_to_disk_loses_that_record_alone(
    launch: Launch, reference: dict[tuple[int, int], str], tmp_path: Path
) -> None:
    options = ("--trace", "--pause", "0.03", "--at", "5:torn")
    done = launch("train.py", *options, ranks=2, expect=None, TULA_URL="http://127.0.0.1:9")
    assert done.codes[0] == -signal.SIGKILL
    before = traced(done)
    assert len(before) > 10
    assert before.items() <= reference.items()
    [torn] = (tmp_path / "spool").glob("run1-0-*.spool")
    assert torn.read_bytes().count(b"TUL1") == len(list(read_records(torn))) + 1


def test_a_spool_that_is_cut_at_every_step_changes_no_step_and_sends_no_half_record(
    sink: Sink, launch: Launch, reference: dict[tuple[int, int], str], tmp_path: Path
) -> None:
    sink.behaviour = "error"
    recover = threading.Timer(1.5, setattr, (sink, "behaviour", "ok"))
    recover.start()
    options = ("--trace", "--pause", "0.05", "--cut-spool", "--at", "0:full-queue")
    done = launch("train.py", *options, ranks=2)
    recover.join()
    assert traced(done) == reference
    assert not sink.invalid
    late = Sink()
    server = start(late)
    transport = Transport(late.url, None, 5.0)
    upload_spool(tmp_path / "spool", transport)
    transport.close()
    server.shutdown()
    server.server_close()
    assert not late.invalid


@pytest.mark.parametrize("what", ["clock", "full-queue"])
def test_a_clock_a_day_back_or_a_fork_with_a_full_queue_changes_no_step(
    sink: Sink, launch: Launch, reference: dict[tuple[int, int], str], tmp_path: Path, what: str
) -> None:
    sink.behaviour = "ok" if what == "clock" else "error"
    done = launch("train.py", "--trace", "--pause", "0.02", "--at", f"30:{what}", ranks=2)
    assert traced(done) == reference
    assert all(0.015 < time_s < 5 for body in sink.samples for time_s in body["step_time_s"])
    assert what != "clock" or sink.steps() == list(range(64))
    kept = [record for path in (tmp_path / "spool").glob("*.spool") for record in read_records(path)]
    assert bool(kept) == (what != "clock")
    assert len({(record.path, record.body) for record in kept}) == len(kept)  # the child wrote nothing of its parent's
    assert not list(tmp_path.glob("spool/*fork*"))
