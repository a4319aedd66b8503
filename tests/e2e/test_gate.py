"""Tests that `tula gate` on a small repository distinguishes a change that slows the steps from one that does not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.support.forked import Server
from tests.e2e.command import BATCH, ONE_RANK, Tula
from tula_client.launch.gate import slower

SCRIPT = """
import sys, time, torch, tula_agent
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
size = int(sys.argv[1].partition("=")[2])
loader = torch.utils.data.DataLoader(torch.randn(64 * size, 4), size)
run = tula_agent.init()
run.watch(model, optimizer)
for batch in run.steps(loader):
    time.sleep({pace_s})
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMMAND = ["--", "env", *ONE_RANK, "python", "train.py", *BATCH]
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false"]


def commit(folder: Path, script: str, name: str) -> None:
    folder.joinpath("train.py").write_text(script)
    for words in (["add", "train.py"], ["commit", "--quiet", "-m", name], ["branch", "--force", name]):
        subprocess.run([*GIT, *words], cwd=folder, check=True)


@pytest.fixture
def tula(server: Server, tmp_path: Path) -> Tula:
    """Return the command in a repository with commits `before` and `main`; the steps of `main` take a tenth longer."""
    repository = tmp_path / "repository"
    repository.mkdir()
    subprocess.run([*GIT, "init", "--quiet", "--initial-branch=trunk"], cwd=repository, check=True)
    commit(repository, SCRIPT.format(pace_s=0.3), "before")
    commit(repository, SCRIPT.format(pace_s=0.33), "main")
    return Tula(server, repository, forked=True)


def test_the_gate_closes_for_a_commit_that_is_a_tenth_slower_and_says_by_how_much(tula: Tula) -> None:
    data = tula.folder / "data.bin"  # git does not track this file, so both revisions may read it
    data.touch()
    answer, said = tula("gate", tula.spec("gated", nodes=1), "--against=before", "--pairs=5", "--markdown=c.md",
                     *COMMAND, f"--data={data}", fails=True)  # fmt: skip
    assert answer is not None, said
    assert answer["exceeded"]
    assert 0.0 < answer["slower"]["low"] < answer["slower"]["value"] < answer["slower"]["high"]
    assert answer["slower"]["value"] == pytest.approx(0.1, abs=0.05)
    assert re.match(r"This change makes the training \d+\.\d % \[\d+\.\d, \d+\.\d\] slower", answer["sentence"])
    comment = (tula.folder / "c.md").read_text()
    assert "Slower by more than the allowed 2 %" in comment
    assert answer["sentence"] in comment
    worktrees = subprocess.run([*GIT, "worktree", "list"], cwd=tula.folder, check=True, capture_output=True, text=True)
    assert worktrees.stdout.count("\n") == 1, "the checkout of the base is gone"
    with tula.client() as client:
        jobs = {job.name for job in client.jobs().jobs}
    assert not any(name.startswith("gated@") for name in jobs), "the jobs of the gate are archived"


def test_the_gate_stays_open_for_a_change_that_alters_no_step(tula: Tula) -> None:
    commit(tula.folder, SCRIPT.format(pace_s=0.33) + "# a comment\n", "comment")
    answer, _ = tula("gate", tula.spec("ungated", nodes=1), "--against=main", "--pairs=3", "--threshold=5", *COMMAND)
    assert not answer["exceeded"]
    assert abs(answer["slower"]["value"]) < 0.05


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against=nowhere"], "--against: git rev-parse failed"),
        (["--against=main"], "--against main is the current revision, without changes"),
        (
            ["--against=before", "--markdown=no/folder/c.md"],
            "--markdown no/folder/c.md: the folder no/folder does not exist",
        ),
        (["--against=before", "--pairs=2"], "--pairs"),
        (["--against=before", "--configuration=7x7"], "--configuration 7x7: the job has no such configuration"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_is_launched(tula: Tula, words: list[str], said: str) -> None:
    _, error = tula("gate", tula.spec("wrong", nodes=1), *words, *COMMAND, fails=True)
    assert said in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tula.folder.glob(".tula/*/logs/*"))


def test_an_absolute_path_into_the_repository_is_refused_since_both_sides_would_run_it(tula: Tula) -> None:
    command = [*COMMAND[:-2], str(tula.folder / "train.py"), *BATCH]
    _, error = tula("gate", tula.spec("absolute", nodes=1), "--against=before", *command, fails=True)
    assert "both revisions would run the same file" in error


def test_a_change_of_a_tenth_is_told_from_noise_of_two_percent() -> None:
    base = [1.00, 1.02, 0.99, 1.01, 0.98]
    noisy = [1.01, 0.99, 1.00, 1.02, 0.99]
    assert slower(base, [1.1 * step_s for step_s in noisy]).low > 0.05
    same = slower(base, noisy)
    assert same.low < 0.0 < same.high


def test_the_difference_is_of_pairs_so_that_a_drift_of_the_machine_cancels() -> None:
    base = [1.0, 1.1, 1.3, 1.2]
    result = slower(base, [1.05 * step_s for step_s in base])
    assert (result.low, result.value, result.high) == pytest.approx((0.05, 0.05, 0.05))
    noisy = slower([1.0, 1.0, 1.0], [1.1, 0.9, 1.0])
    assert noisy.low < 0.0 < noisy.high
