"""Tests how a command's out-of-memory error is recognised, and which lines of its log are shown as the error."""

from __future__ import annotations

import pytest

from tests.client.launch.fakes import FakeService, configuration
from tula_client.launch.judge import agent_warnings, judge, ran_out_of_memory, relevant_lines

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


FRAMES = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    model(x)"]
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3811"


@pytest.mark.parametrize(
    "line",
    [
        CUDA,
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried",
        "MemoryError",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 EiB for an array with shape (2,)",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: Caught MemoryError in DataLoader worker process 0.",
    ],
)
def test_an_exception_of_memory_that_ends_a_rank_is_one(line):
    assert ran_out_of_memory(["epoch 1", *FRAMES, line])
    assert ran_out_of_memory([f"[rank1]: {text}" for text in (*FRAMES, line)] + ["[rank0]: the end"])
    assert ran_out_of_memory([*FRAMES, line, *FRAMES, PEER, *TORCHRUN.splitlines()[4:]])
    assert not ran_out_of_memory(["epoch 1", line, "the end"]), "it was caught, or is part of a message"
    assert not ran_out_of_memory([*FRAMES, line, "skipping batch", *FRAMES, "KeyError: 'labels'"])


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.",
        "srun: error: node7: task 0: Out Of Memory",
        "  exitcode  : -9 (pid: 3811)",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "[rank3]: tula: rank 3 ran out of memory at a local batch of 64",
        "command terminated with exit code 137",
    ],
)
def test_a_launcher_or_the_agent_reports_an_out_of_memory_in_a_line_of_its_own(line):
    assert ran_out_of_memory(["epoch 1", line, "the end"])


@pytest.mark.parametrize(
    "line",
    [
        "If you run out of memory, lower --batch-size (see README)",
        "config: {'on_out_of_memory': 'skip-batch'} | oom_kill_disable=False",
        "W torch: PYTORCH_CUDA_ALLOC_CONF can reduce Out-of-Memory errors",
        "warning: swap off; Cannot allocate memory cgroup hint",
        "skipping batch: CUDA out of memory (3rd time), continuing",
        "memory used: 3 GiB",
        "exitcode : 1 (pid: 9)",
    ],
)
@pytest.mark.parametrize(
    "ended_by", ["KeyError: 'labels'", "FileNotFoundError: [Errno 2] No such file: '/data/m.json'"]
)
def test_words_about_memory_make_no_failure_one_of_memory(line, ended_by):
    assert not ran_out_of_memory([line, *FRAMES, ended_by, *TORCHRUN.splitlines()[4:]])


def test_an_exception_raised_from_one_of_memory_is_one():
    above = "The above exception was the direct cause of the following exception:"
    during = "During handling of the above exception, another exception occurred:"
    wrapped = [*FRAMES, "RuntimeError: training failed"]
    assert ran_out_of_memory([*FRAMES, CUDA, "", above, "", *wrapped])
    assert not ran_out_of_memory([*FRAMES, CUDA, "", during, "", *wrapped])


@pytest.mark.parametrize("status", [0, 1, 137, 143])
def test_a_profiling_run_that_measured_enough_is_a_success_whatever_its_command_does_next(status):
    run = FakeService().add("profile", configuration(), "succeeded")
    assert judge(run, status, [*FRAMES, CUDA], timed_out_after_s=9.0).state == "succeeded"


def test_the_scripts_error_comes_before_the_launchers_tables():
    assert relevant_lines(TORCHRUN.splitlines())[0].startswith("FileNotFoundError: [Errno 2]")
    assert not any("elastic" in line or "====" in line for line in relevant_lines(TORCHRUN.splitlines()))


def test_the_error_of_another_rank_is_shown_with_its_rank_and_without_frames():
    """torchrun marks every line with its rank, and torch marks the lines of a traceback again."""
    lines = [f"[rank1]: [rank1]: {line}" for line in TORCHRUN.splitlines()[:4]] + TORCHRUN.splitlines()[4:]
    assert (
        relevant_lines(lines)[0] == "[rank1]: FileNotFoundError: [Errno 2] No such file or directory: '/data/imagenet'"
    )
    assert ran_out_of_memory([*(f"[rank1]: [rank1]: {line}" for line in (*FRAMES, CUDA)), *TORCHRUN.splitlines()[4:]])


def test_too_few_nodes_are_named_by_srun():
    lines = ["srun: error: Unable to allocate resources: Requested node configuration is not available"]
    assert relevant_lines(lines) == lines


def test_agent_warnings_are_returned_once():
    assert agent_warnings(["x", "[rank1]: tula: hello", "tula: hello"]) == ["hello"]
