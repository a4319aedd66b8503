"""Logs: out-of-memory in every usual wording, and the lines with the error."""

from __future__ import annotations

import pytest

from tula_client.launch.judge import agent_warnings, ran_out_of_memory, relevant_lines

TORCHRUN = """\
Traceback (most recent call last):
  File "/x/train.py", line 3, in <module>
    load()
FileNotFoundError: [Errno 2] No such file or directory: '/data/imagenet'
E0101 10:00:00.000000 77 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/v/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  host      : node
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 99)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried",
        "MemoryError",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 EiB for an array with shape (2,)",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0",
        "  exitcode  : -9 (pid: 3811)",
        "  traceback : Signal 9 (SIGKILL) received by PID 3811",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "tula: rank 3 ran out of memory at a local batch of 64",
    ],
)
def test_an_out_of_memory_is_detected_in_a_line(line):
    assert ran_out_of_memory(["epoch 1", line, "the end"])


@pytest.mark.parametrize(
    "line", ["memory used: 3 GiB", "ValueError: bad shape", "exitcode : 1 (pid: 9)", "out of data"]
)
def test_ordinary_lines_are_no_out_of_memory(line):
    assert not ran_out_of_memory([line])


def test_the_scripts_error_comes_before_the_launchers_tables():
    assert relevant_lines(TORCHRUN.splitlines())[0].startswith("FileNotFoundError: [Errno 2]")
    assert not any("elastic" in line or "====" in line for line in relevant_lines(TORCHRUN.splitlines()))


def test_too_few_nodes_are_named_by_srun():
    lines = ["srun: error: Unable to allocate resources: Requested node configuration is not available"]
    assert relevant_lines(lines) == lines


def test_agent_warnings_are_returned_once():
    assert agent_warnings(["x", "[rank1]: tula: hello", "tula: hello"]) == ["hello"]
