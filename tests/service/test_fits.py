"""Tests that fits run in a separate process, which is replaced if it dies and never outlives the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

import tula_wire as wire
from benchmarks.support.server import Server, make_token
from tests.service.api.conftest import SPEC
from tula_service.analysis.job_data import JobData
from tula_service.analysis.questions import WhatIf, answer_what_if, report_findings
from tula_service.errors import Busy, InvalidInput
from tula_service.fits import Fits
from tula_wire import routes

DATA = JobData(spec=SPEC, objective="knee", data_version=1)
HOLDS_A_FIT = """
import os, time
from tula_service.fits import Fits

if __name__ == "__main__":
    fits = Fits()
    fits.start().result()
    with fits.turn() as compute:
        print(compute(os.getpid), flush=True)
        compute(time.sleep, 3600.0)
"""


HAS_NO_FILE_LEFT = """
import os, resource
from tula_service.fits import Fits

fits = Fits()
open_files = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
print(fits.start())
with fits.turn() as compute:
    print(compute(os.getpid) == os.getpid())
"""


@pytest.fixture(scope="module")
def fits() -> Iterator[Fits]:
    """Start a queue with a process for fits."""
    started = Fits()
    ready = started.start()
    assert ready is not None
    ready.result()
    yield started
    started.close()


def test_a_process_finds_what_a_thread_finds(fits: Fits) -> None:
    with fits.turn() as compute:
        assert compute(os.getpid) != os.getpid()
        assert compute(report_findings, DATA, "time", True) == report_findings(DATA, "time", True)
        question = WhatIf(num_nodes=[2], local_batch_size=[16])
        assert compute(answer_what_if, DATA, "job-1", question) == answer_what_if(DATA, "job-1", question)


def test_without_a_ready_process_the_callers_thread_computes() -> None:
    fits = Fits()
    with fits.turn() as compute:
        assert compute(os.getpid) == os.getpid()


def test_a_refusal_arrives_with_its_field(fits: Fits) -> None:
    with fits.turn() as compute, pytest.raises(InvalidInput, match="mutually exclusive") as refused:
        compute(answer_what_if, DATA, "job-1", WhatIf(global_batch_size=[64], local_batch_size=[16]))
    assert refused.value.field == "local_batch_size"


def test_a_process_that_died_is_replaced_and_one_that_always_dies_is_busy(fits: Fits) -> None:
    with fits.turn() as compute:
        first = compute(os.getpid)
        os.kill(first, signal.SIGKILL)
        assert compute(os.getpid) not in (first, os.getpid())
        with pytest.raises(Busy, match="failed twice"):
            compute(os._exit, 1)
        assert report_findings(DATA) == compute(report_findings, DATA)


def test_a_fit_that_hangs_is_ended_and_the_next_one_gets_another_process(caplog: pytest.LogCaptureFixture) -> None:
    fits = Fits(longest_s=5.0)
    ready = fits.start()
    assert ready is not None
    ready.result()
    with fits.turn() as compute:
        hung = psutil.Process(compute(os.getpid))
        with pytest.raises(Busy, match="A fit was stopped after 5 s"):
            compute(time.sleep, 3600.0)
        hung.wait(30)
        with pytest.raises(Busy, match="the fit can be tried again after ten minutes"):
            compute(time.sleep, 3600.0)
        assert compute(os.getpid) not in (hung.pid, os.getpid())
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    fits.close()


def test_a_process_that_cannot_be_started_is_one_sentence_and_threads_compute() -> None:
    done = subprocess.run([sys.executable, "-c", HAS_NO_FILE_LEFT], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["None", "True"]
    assert done.stderr.splitlines() == [line for line in done.stderr.splitlines() if "could not be started" in line]
    assert done.stderr.count("allow the service one more process") == 1


def test_the_process_leaves_the_cores_to_requests_and_takes_one(fits: Fits) -> None:
    with fits.turn() as compute:
        compute(report_findings, DATA)
        process = psutil.Process(compute(os.getpid))
        assert compute(os.getenv, "OPENBLAS_NUM_THREADS") == "1"
    assert process.nice() > psutil.Process().nice() or process.nice() == 19


def test_the_process_ends_with_a_parent_that_is_killed_while_it_computes() -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLDS_A_FIT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    process.wait(30)


def test_a_service_fits_in_another_process_survives_its_end_and_leaves_none_behind(sqlite_url: str) -> None:
    with Server(sqlite_url) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.headers["Authorization"] = f"Bearer {make_token(sqlite_url)}"
        made = client.post(routes.JOBS, json=SPEC.model_dump(mode="json")).raise_for_status().json()
        (first,) = server.fit_ids()
        os.kill(first, signal.SIGKILL)
        ask = routes.JOB_PREDICTIONS.format(job_id=made["job"]["id"])
        while server.fit_ids() in ([], [first]):  # it takes a moment until the service notices
            answer = client.get(ask).raise_for_status()
            assert wire.read(wire.Predictions, answer.text).job_id == made["job"]["id"]
        (second,) = (psutil.Process(pid) for pid in server.fit_ids())
        assert second.pid != first
        server.process.kill()
        second.wait(30)
