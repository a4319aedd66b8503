"""Tests that the supervisor leaves no process behind, whichever process dies first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tula_client._errors import UsageError
from tula_client.launch.judge import ran_out_of_memory, relevant_lines, tail
from tula_client.launch.process import LogLines, command_environment, start

# A command whose grandchild moves to another session, as torchrun's ranks do, and may ignore SIGTERM.
FAMILY = """
import subprocess, sys, time
code = "import signal, time, sys; {ignore}; print('child up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), "pids", child.pid, flush=True)
{then}
"""


def family(ignore: bool, then: str = "time.sleep(600)") -> list[str]:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if ignore else "pass"
    return [sys.executable, "-c", FAMILY.format(ignore=text, then=then)]


def wait_until(condition, within_s: float = 20.0):
    until = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def grandchild(log: Path) -> int:
    text = wait_until(lambda: log.exists() and re.search(r"child up pids \d+\n", log.read_text()) and log.read_text())
    return int(text.split("pids ")[1].split()[0])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONFAULTHANDLER": "1"}


@pytest.mark.parametrize(("script", "status"), [("pass", 0), ("import sys; sys.exit(3)", 3)])
def test_the_exit_status_is_the_commands_own(tmp_path, script, status):
    process = start([sys.executable, "-c", script], environment=environment(), log=tmp_path / "log")
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == status


def test_a_killed_command_reads_as_128_plus_its_signal(tmp_path):
    script = "import os; os.kill(os.getpid(), 9)"
    process = start([sys.executable, "-c", script], environment=environment(), log=tmp_path / "log")
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 137


def test_a_missing_command_is_named(tmp_path):
    with pytest.raises(UsageError, match="'no-such-launcher' was not found"):
        start(["no-such-launcher"], environment=environment(), log=tmp_path / "log")


def test_a_command_whose_stop_command_is_missing_is_not_started(tmp_path):
    command = [sys.executable, "-c", "print('started', flush=True)"]
    with pytest.raises(UsageError, match="the stop command 'scancl' was not found"):
        start(command, environment=environment(), log=tmp_path / "log", stop_command=["scancl", "1"])
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("ignore_sigterm", [False, True])
def test_stopping_ends_processes_that_left_the_session(tmp_path, ignore_sigterm):
    log = tmp_path / "log"
    process = start(family(ignore_sigterm), environment=environment(), log=log, grace_s=0.3)
    pid = grandchild(log)
    process.stop()
    assert not alive(pid)


# A command as `bash -c` or torchrun: its rank saves at SIGTERM, from what a helper process gives it.
SAVES = """
import signal, subprocess, sys, time
helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("up", flush=True)
while not asked:
    time.sleep(0.01)
for part in range(10):
    helper.stdin.write(b"part\\n"), helper.stdin.flush()
    assert helper.stdout.readline() == b"part\\n"
    time.sleep(0.05)
print("saved", flush=True)
"""


@pytest.mark.parametrize("shell", [False, True])
def test_a_rank_that_saves_when_asked_to_end_keeps_the_processes_that_it_needs(tmp_path, shell):
    """SIGTERM goes only to the command or, if the command is a shell that dies, to its orphaned child."""
    command, log = [sys.executable, "-c", SAVES], tmp_path / "log"
    if shell:
        command = ["bash", "-c", '"$@"; true', "-", *command]
    process = start(command, environment=environment(), log=log, grace_s=8)
    wait_until(lambda: "up" in log.read_text())
    process.stop()
    assert "saved" in log.read_text()


def test_what_ignores_its_parents_signal_is_asked_itself_before_it_is_killed(tmp_path):
    """If a command does not end its children, each of them gets SIGTERM after half of the grace period."""
    child = "import signal, sys, time; signal.signal(15, lambda *_: (print('asked', flush=True), sys.exit()))\n"
    child += "print('up', flush=True); time.sleep(600)"
    script = "import signal, subprocess, sys; signal.signal(15, lambda *_: 0)\n"
    script += f"subprocess.run([sys.executable, '-c', {child!r}])"
    log = tmp_path / "log"
    process = start([sys.executable, "-c", script], environment=environment(), log=log, grace_s=2)
    wait_until(lambda: "up" in log.read_text())
    process.stop()
    assert "asked" in log.read_text()


def test_a_child_left_by_a_command_that_ended_is_ended_too(tmp_path):
    log = tmp_path / "log"
    process = start(family(False, then="time.sleep(0.2)"), environment=environment(), log=log, grace_s=0.3)
    pid = grandchild(log)
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 0
    assert not alive(pid)


def test_kill_9_of_the_starter_leaves_no_process(tmp_path):
    log = tmp_path / "log"
    starter = f"""
import os, time, pathlib, psutil
from tula_client.launch.process import start
process = start({family(True)!r}, environment=dict(os.environ), log=pathlib.Path({str(log)!r}), grace_s=0.2)
print(*[child.pid for child in psutil.Process().children()], flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as outer:
        guard = int(outer.stdout.readline())
        pid = grandchild(log)
        outer.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive(pid) and not alive(guard))


def test_the_stop_command_cancels_what_runs_elsewhere(tmp_path):
    process = start(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        environment=environment(),
        log=tmp_path / "log",
        grace_s=0.3,
        stop_command=["touch", str(tmp_path / "cancelled")],
    )
    process.stop()
    assert (tmp_path / "cancelled").exists()


def test_each_rank_shows_its_stack_even_when_the_first_would_bring_down_the_rest(tmp_path):
    script = """
import os, subprocess, sys, time
code = "import time\\ndef stuck_here():\\n    print('up', flush=True); time.sleep(600)\\nstuck_here()"
ranks = [subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(r)}) for r in range(3)]
while all(rank.poll() is None for rank in ranks):  # as torchrun does: one gone, all ended
    time.sleep(0.005)
for rank in ranks:
    rank.terminate()
"""
    log = tmp_path / "log"
    process = start([sys.executable, "-c", script], environment=environment(), log=log, grace_s=1)
    wait_until(lambda: log.read_text().count("up") == 3)
    process.request_stop(stacks=True)
    wait_until(lambda: process.poll() is not None)
    text = log.read_text()
    assert [f"Stack of rank {rank}" in text for rank in range(3)] == [True] * 3
    assert text.count("in stuck_here") == 3


def test_a_log_is_followed_line_by_line_without_those_of_other_ranks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = LogLines(log)
    assert lines.new() == []
    log.write_bytes(b"one\r\n\n 5%\r10%\n 5%\r20%[rank1]: no\n[default0]: two\n[default12]: no\n[rank1]: no\nthr")
    assert lines.new() == ["one", "", "10%", "20%", "[default0]: two"]
    assert lines.new() == []
    with log.open("ab") as file:
        file.write(b"ee\n\xff end")
    assert lines.new(last=True) == ["three", "\ufffd end"]


RANK = """
import os, sys, time
from pathlib import Path
rank = os.environ["RANK"]
print("out of", rank)
print("err of", rank, file=sys.stderr)
written = Path(sys.argv[1])
if rank == "1":
    while not written.exists():  # torchrun ends rank 0 as soon as this rank fails
        time.sleep(0.01)
    raise RuntimeError("CUDA out of memory")
written.touch()
time.sleep(600)
"""


@pytest.mark.slow
def test_torchrun_marks_the_lines_of_other_ranks_and_keeps_them_by_rank(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    log, folder = tmp_path / "log", tmp_path / "ranks"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(tmp_path / "rank.py"), str(tmp_path / "written")]
    process = start(command, environment=command_environment(os.environ, {}, command, rank_logs=folder), log=log)
    wait_until(lambda: process.poll() is not None, within_s=100)
    lines = tail(log)
    assert {"out of 0", "err of 0", "[rank1]: out of 1", "[rank1]: err of 1"} <= {*lines}
    shown = LogLines(log).new(last=True)
    assert {"out of 0", "err of 0"} <= {*shown}
    assert not any("of 1" in line for line in shown)
    assert ran_out_of_memory(lines)
    assert "[rank1]: RuntimeError: CUDA out of memory" in relevant_lines(lines)
    kept = {path.parent.name: path.read_text() for path in folder.rglob("stdout.log")}
    assert kept == {"1": "out of 1\n"}


@pytest.mark.parametrize(
    ("command", "inherited"),
    [
        (["torchrun", "--tee=3", "train.py"], {}),
        (["bash", "-c", "torchrun --log-dir /logs train.py"], {}),
        (["torchrun", "train.py"], {"PET_REDIRECTS": "3"}),
        (["torchrun", "-r3", "train.py"], {}),
        (["srun", "torchrun", "train.py"], {}),  # on other machines
        (["bash", "-c", "cd /code && /usr/bin/srun torchrun train.py"], {}),
        (["bash", "-c", "docker run --rm image torchrun train.py"], {}),
        (["python", "train.py"], {}),
    ],
)
def test_where_ranks_write_is_left_alone(command: list[str], inherited: dict[str, str]) -> None:
    """In each case, the user has chosen where ranks write, or this machine does not start torchrun."""
    plain = command_environment(inherited, {}, command)
    assert command_environment(inherited, {}, command, rank_logs=Path("/ranks")) == plain
    assert command_environment({}, {}, ["torchrun"], rank_logs=Path("/ranks"))["PET_LOG_DIR"] == "/ranks"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_setting_of_the_allocator_that_a_user_gave_is_the_only_one(name: str) -> None:
    """In torch, the variable for CUDA takes precedence even on ROCm, so a default there would override the user's."""
    given = command_environment({name: "max_split_size_mb:64"}, {})
    assert {key: value for key, value in given.items() if "ALLOC" in key} == {name: "max_split_size_mb:64"}
    assert command_environment({}, {})["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
