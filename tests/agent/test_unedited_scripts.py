"""Tests that the start-up hook measures scripts that do not use Tula and resemble public ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.support.fork_server import ForkServer
from tests.agent.conftest import Launch, framework_fork_server
from tests.agent.sink import Sink

SCRIPTS = Path(__file__).parents[1] / "e2e" / "scripts" / "unedited"
PROFILE = {"TULA_KIND": "profile", "TULA_WARMUP_STEPS": "2", "TULA_MEASURE_STEPS": "20", "TULA_LOCAL_BATCH_SIZE": "8"}
ACCUMULATING = {"accumulation.py", "hf_trainer.py", "own_batches.py"}
NOT_SEEN = {"fsdp.py": "communication", "own_batches.py": "the batches, since no DataLoader yields them"}
CUT = (
    "plain_ddp.py",
    "amp_autocast.py",
    "accumulation.py",
    "gan.py",
    "detection.py",
    "zero_redundancy.py",
    "lightning_trainer.py",
)
FORKED = sorted(path.name for path in SCRIPTS.glob("*.py") if path.name != "mp_spawn.py")


@pytest.fixture(scope="module")
def forks() -> ForkServer:
    """Return the fork server that has imported the frameworks."""
    return framework_fork_server()


def test_the_page_on_what_was_run_lists_every_script() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "runs.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, flags=re.M)
    assert sorted(f"{name}.py" for name in listed) == sorted(path.name for path in SCRIPTS.glob("*.py"))
    assert len(listed) == 14


def check_measured(sink: Sink, script: str, world_size: int = 2) -> None:
    """Assert that rank 0's samples have the script's batch, accumulation and world size, and that the run succeeded."""
    assert not sink.invalid
    measured = [body for body in sink.samples if body["rank"] == 0]
    seen = {(body["local_batch_size"], body["grad_accum_steps"], body["world_size"]) for body in measured}
    assert seen == {(8, 2 if script in ACCUMULATING else 1, world_size)}
    assert sink.states == ["running", "succeeded"]


@pytest.mark.parametrize("script", FORKED)
def test_a_profiling_run_measures_and_leaves_on_all_ranks(sink: Sink, launch: Launch, script: str) -> None:
    # the script's accumulation counts, not the launcher's
    done = launch(
        "with_hook.py", str(SCRIPTS / script), "--batch-size=8", ranks=2, TULA_GRAD_ACCUM_STEPS="1", **PROFILE
    )
    assert "complete" not in done.stdout  # left by SystemExit(0)
    check_measured(sink, script)
    assert len(sink.steps()) >= 19  # all but those of the last, smaller batch of an epoch
    # Lightning's callback sees the script's first step, too, so that step 21 is the last, smaller batch of an epoch.
    assert sink.steps()[-1] == (20 if script == "lightning_trainer.py" else 21)
    assert done.stderr.count("cannot see " + NOT_SEEN.get(script, "")) == (script in NOT_SEEN)
    assert "failed" not in done.stderr


@pytest.mark.parametrize("script", [*CUT, "accelerate_loop.py"])
def test_one_launch_measures_several_batches(sink: Sink, launch: Launch, script: str) -> None:
    """Batches are cut in the loader or by Lightning's callback; accelerate gets whole batches and a warning."""
    smaller = {"TULA_SMALLER_BATCHES": "2=small,4=middle"}
    done = launch("with_hook.py", str(SCRIPTS / script), "--batch-size=8", ranks=2, **PROFILE, **smaller)
    assert "complete" not in done.stdout
    assert not sink.invalid
    measured = {path.split("/")[3]: body for _, path, body in sink.requests if path.endswith("/samples")}
    batches = {run: (body["local_batch_size"], body["grad_accum_steps"]) for run, body in measured.items()}
    accumulated = 2 if script in ACCUMULATING else 1
    if script not in CUT:
        assert batches == {"run1": (8, 1)}
        assert "measures one batch size instead of several" in done.stderr
    else:
        assert batches == {"small": (2, accumulated), "middle": (4, accumulated), "run1": (8, accumulated)}
        ended = [path.split("/")[3] for _, path, body in sink.requests if body.get("state") == "succeeded"]
        assert ended == ["small", "middle", "run1"]
        assert "tula:" not in done.stderr


def test_ranks_that_the_script_spawns_are_measured(sink: Sink, launch: Launch) -> None:
    """The hook measures spawned ranks, although their processes import torch only after Python has started.

    This test has one rank; `test_run.py` has two ranks that find each other without variables.
    """
    done = launch(str(SCRIPTS / "mp_spawn.py"), "--batch-size=8", "--world-size=1", **PROFILE)
    assert "complete" not in done.stdout
    check_measured(sink, "mp_spawn.py", world_size=1)
    assert sink.steps() == list(range(22))


@pytest.mark.parametrize("script", ["accelerate_loop.py", "accumulation.py", "hf_trainer.py"])
def test_training_ends_with_the_same_weights_and_each_of_its_steps_is_counted(
    sink: Sink, launch: Launch, script: str
) -> None:
    arguments = (str(SCRIPTS / script), "--batch-size=8", "--epochs=4")
    plain = launch(*arguments, ranks=2, TULA_DISABLED="1")
    done = launch("with_hook.py", *arguments, ranks=2, TULA_KIND="train")
    assert len(plain.printed("complete")) == 2
    assert done.printed("complete") == plain.printed("complete")
    check_measured(sink, script)
    steps = 4 * 80 // 8 // (2 if script in ACCUMULATING else 1)
    assert sink.steps() == list(range(steps - 1))  # the first is over when the agent begins
