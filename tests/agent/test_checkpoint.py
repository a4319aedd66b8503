"""Tests that a resumed training run equals an uninterrupted one bit for bit."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tula_agent import init
from tula_agent.checkpoint import CheckpointError
from tula_agent.position import capture_randomness, restore_randomness
from tula_agent.scaling import TulaOptimizer

SCRIPT = Path(__file__).parent / "scripts" / "resumable.py"
SHARDED = SCRIPT.with_name("resumable_shards.py")


@pytest.fixture(scope="module")
def train(alone):
    """Return a function that trains with checkpoints in a folder and returns its output with the final weights."""

    def run(folder: Path, *arguments: str, ranks: int = 0, script: Path = SCRIPT) -> str:
        return alone(script, *arguments, ranks=ranks, TULA_CHECKPOINT_DIR=str(folder)).stdout

    return run


def digests(printed: str) -> dict[str, str]:
    """Return the digest of the final weights by rank and policy."""
    lines = [line.split(maxsplit=2) for line in printed.splitlines() if line.startswith("weights ")]
    return {who: digest for _, digest, who in lines}


def test_a_resumed_run_ends_with_the_same_bits(train, tmp_path):
    whole = train(tmp_path / "a", "--workers", "2", "--keep", str(tmp_path / "b"))
    resumed = train(tmp_path / "b", "--workers", "2")
    assert "resumed at step 12" in resumed  # in the middle of the second pass
    assert len(digests(whole)) == 1
    assert digests(resumed) == digests(whole)


def test_two_ranks_resume_with_the_state_of_their_gradient_scaling(train, tmp_path):
    policies = ("--policies", "none", "gain", "ags")
    whole = train(tmp_path / "a", *policies, "--keep", str(tmp_path / "b"), ranks=2)
    resumed = train(tmp_path / "b", *policies, ranks=2)
    assert resumed.count("resumed at step 12") == 6
    ended = digests(whole)
    assert len(ended) == 6
    assert ended["rank 0 policy ags"] == ended["rank 1 policy ags"] != ended["rank 0 policy none"]  # it did scale
    assert digests(resumed) == ended


def test_a_sharded_run_resumed_from_its_shards_ends_with_the_same_bits(train, tmp_path):
    whole = train(tmp_path / "a", "--keep", str(tmp_path / "b"), ranks=2, script=SHARDED)
    assert (tmp_path / "b" / "step-0000000012" / "__1_0.distcp").exists()  # the second rank's part
    resumed = train(tmp_path / "b", ranks=2, script=SHARDED)
    assert resumed.count("resumed at step 12") == 2
    assert len(set(digests(whole).values())) == 2  # each rank holds, and answers for, its own part
    assert digests(resumed) == digests(whole)


def small():
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_old_checkpoints_are_deleted_and_incomplete_ones_are_not_read(tmp_path):
    model, optimizer = small()
    run = init()
    for _ in run.steps([0, 1, 2, 3]):
        run.checkpoint(model, optimizer, directory=tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step-0000000003", "step-0000000004"]
    (tmp_path / kept[-1] / ".metadata").unlink()
    assert init().resume(model, optimizer, directory=tmp_path).step == 3


def test_a_copy_beside_the_checkpoints_is_neither_read_nor_deleted(tmp_path):
    model, optimizer = small()
    run = init()
    for number in run.steps([1.0, 2.0, 3.0, 4.0]):
        run.checkpoint(model, optimizer, directory=tmp_path)
        if number == 2.0:
            shutil.copytree(tmp_path / "step-0000000002", tmp_path / "step-0000000002-backup")
            shutil.copytree(tmp_path / "step-0000000002", tmp_path / "step-best")
    assert run.resume(model, optimizer, directory=tmp_path).step == 4
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step-0000000002-backup", "step-0000000003", "step-0000000004", "step-best"]


def test_what_tula_did_not_write_is_never_deleted(tmp_path):
    foreign = [tmp_path / "step-100" / "__0_0.distcp", tmp_path / "step-0000000001" / "training.pt"]
    for path in foreign:
        path.parent.mkdir()
        path.write_text("another trainer's")
    model, optimizer = small()
    run = init()
    for number in run.steps([1, 2, 3, 4, 5]):
        if number > 1:
            folder = run.checkpoint(model, optimizer, directory=tmp_path)
        if number == 2:
            (folder / "notes.txt").write_text("the script's")
    assert [path.read_text() for path in foreign] == ["another trainer's"] * 2
    assert [path.name for path in (tmp_path / "step-0000000002").iterdir()] == ["notes.txt"]
    run = init()
    for _ in run.steps([1]):
        with pytest.raises(CheckpointError, match="step-0000000001 was not written by Tula"):
            run.checkpoint(model, optimizer, directory=tmp_path)


def test_what_wraps_the_model_does_not_matter(tmp_path):
    model, optimizer = small()
    init().checkpoint(torch.compile(model, backend="eager"), optimizer, directory=tmp_path)
    other = torch.nn.Linear(2, 1)
    assert init().resume(other, directory=tmp_path).found
    assert torch.equal(other.weight, model.weight)


def test_weights_are_read_into_their_place(tmp_path):
    model, optimizer = small()
    init().checkpoint(model, optimizer, directory=tmp_path)
    place, kept = model.weight.data_ptr(), model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    init().resume(model, optimizer, directory=tmp_path)
    assert model.weight.data_ptr() == place
    assert torch.equal(model.weight, kept)


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "sharded"])
def apart(request, train, tmp_path_factory):
    """Return whether the model is sharded, what both ranks printed in each attempt, and the checkpoint folder."""
    shared, elsewhere = tmp_path_factory.mktemp("shared"), tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "a-file").touch()
    arguments = [str(shared), str(elsewhere), *(["--sharded"] if request.param else [])]
    printed = train(shared, *arguments, ranks=2, script=SCRIPT.with_name("checkpoint_apart.py"))
    said: dict[str, dict[str, tuple[str, str, str]]] = {}
    for line in printed.splitlines():
        if line.count(" | ") == 4:
            name, rank, *rest = line.split(" | ")
            said.setdefault(name, {})[rank] = tuple(rest)
    assert all(sorted(ranks) == ["rank 0", "rank 1"] for ranks in said.values())
    return request.param, said, shared


def test_a_checkpoint_that_one_rank_cannot_write_is_refused_on_all_and_leaves_those_before(apart):
    _, said, _ = apart
    culprits = {
        "unshared": "rank 1: ",
        "first rank blocked": "rank 0: NotADirectoryError",
        "full on the first": "rank 0",
        "again at the same step, full": "rank 0",
        "full on the second": "rank 1",  # each writes its part, also of a model that is not sharded
    }
    for attempt, culprit in culprits.items():
        results = said[attempt]
        assert results["rank 0"] == results["rank 1"]  # one sentence
        weights, on_disk, sentence = results["rank 0"]
        assert weights == "kept"
        assert sentence.startswith("refused: no checkpoint of step ")
        assert culprit in sentence
        assert on_disk == "step-0000000001"


def test_a_directory_that_one_rank_has_not_is_refused_on_all(apart):
    results = apart[1]["the first has no directory"]
    assert results["rank 0"] == results["rank 1"]
    assert results["rank 0"][2].startswith("refused: no checkpoint directory (rank 0: LookupError: none is given): set")


def test_a_checkpoint_that_one_rank_cannot_read_or_that_does_not_fit_it_is_resumed_by_none(apart):
    sharded, said, _ = apart
    failures = {
        "resume unshared": r"cannot be read \(rank 1: FileNotFoundError: ",
        "resume half a file": r"cannot be read \(rank 1: [A-Za-z]+Error: ",
        **(
            {}
            if sharded
            else {"resume where the second's model grew": r"\(rank 1: ValueError: the checkpoint lacks model.3.bias"}
        ),
    }
    for attempt, error in failures.items():
        results = said[attempt]
        assert results["rank 0"] == results["rank 1"]
        weights, _, sentence = results["rank 0"]
        assert weights == "kept" or attempt == "resume half a file"  # what could be read before is loaded
        assert re.match(rf"refused: the checkpoint .* {error}.*\): delete it", sentence)


def test_after_failures_on_one_rank_all_resume_the_newest_checkpoint_that_was_completed(apart):
    _, said, _ = apart
    assert said["first"]["rank 0"][2].startswith("went well")
    for results in said["resume"].values():
        assert results[2] == "went well: 1"


def test_a_checkpoint_of_two_ranks_whole_or_sharded_is_read_by_one(apart):
    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))

    trained = build()
    trained(torch.randn(4, 256)).square().mean().backward()
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    model = torch.compile(build(), backend="eager")
    resumed = init().resume(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=apart[2])
    assert (resumed.step, resumed.exact) == (1, False)
    for mine, theirs in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_second_checkpoint_of_a_step_replaces_the_first_only_once_it_is_complete(tmp_path):
    model, optimizer = small()
    run = init()
    for _ in run.steps([0, 1]):
        run.checkpoint(model, optimizer, extra={"of": "pass"}, directory=tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint of step 2 was written"):
        run.checkpoint(model, optimizer, extra={"of": lambda: None}, directory=tmp_path)
    assert run.resume(model, optimizer, directory=tmp_path).extra == {"of": "pass"}
    again = run.checkpoint(model, optimizer, extra={"of": "end"}, directory=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000001", again.name]
    resumed = init().resume(model, optimizer, directory=tmp_path)
    assert (resumed.step, resumed.extra) == (2, {"of": "end"})


@pytest.mark.parametrize("saves", [3, 4, 5])
def test_the_newest_of_many_checkpoints_of_one_step_is_the_last_that_was_made(tmp_path, saves):
    model, optimizer = small()
    run = init()
    for number in range(1, saves + 1):  # outside `run.steps` every checkpoint is of step 0
        torch.nn.init.constant_(model.weight, number)
        last = run.checkpoint(model, optimizer, extra={"save": number}, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [last.name]
    assert init().resume(model, optimizer, directory=tmp_path).extra == {"save": saves}
    assert model.weight.tolist() == [[saves, saves]]


def test_the_next_checkpoint_deletes_folders_that_crashes_left_unfinished(tmp_path):
    model, optimizer = small()
    run = init()
    for number in run.steps([1, 2, 3]):
        if number == 2:
            (run.checkpoint(model, optimizer, directory=tmp_path) / ".metadata").unlink()
    run.checkpoint(model, optimizer, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000003"]


def test_an_older_checkpoint_that_cannot_be_read_neither_ends_the_training_nor_stays(tmp_path):
    model, optimizer = small()
    run = init()
    for number in run.steps([1, 2, 3, 4]):
        folder = run.checkpoint(model, optimizer, directory=tmp_path)
        if number == 1:
            (folder / "tula.json").write_text("{")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000003", "step-0000000004"]


def test_after_a_smaller_batch_the_place_in_the_data_is_kept_in_examples(tmp_path):
    data = [torch.full((2,), float(i)) for i in range(48)]
    model, optimizer = small()
    run = init()
    for number, _ in enumerate(run.steps(torch.utils.data.DataLoader(data, 8)), 1):
        if number == 3:  # 24 of 48 examples
            run.checkpoint(model, optimizer, directory=tmp_path)
            break
    run = init()
    loader = torch.utils.data.DataLoader(data, 4)
    resumed = run.resume(model, optimizer, loader=loader, directory=tmp_path)
    assert (resumed.epoch, resumed.consumed, resumed.exact) == (0, 6, False)
    assert next(iter(run.steps(loader)))[0, 0] == 24
    assert run.position.epochs_before == 0.5  # as it was at the other batch


def test_progress_before_a_resume_is_counted_in_epochs(tmp_path):
    model, optimizer = small()
    run = init()
    assert run.position.epochs_before == 0.0
    for _ in range(2):
        for _ in run.steps([0, 1, 2]):
            pass
    run.checkpoint(model, optimizer, directory=tmp_path)  # between two passes
    run = init()
    run.resume(model, optimizer, directory=tmp_path)
    assert run.position.epochs_before == 2.0
    for number, _ in enumerate(run.steps([0, 1, 2]), 1):
        if number == 2:
            run.checkpoint(model, optimizer, directory=tmp_path)
    run = init()
    run.resume(model, optimizer, directory=tmp_path)
    assert list(run.steps([0, 1, 2])) == [2]
    assert run.position.epochs_before == pytest.approx(2 + 2 / 3)
    run = init()
    run.resume(model, optimizer, directory=tmp_path)
    assert list(run.steps(iter([0, 1, 2]))) == [2]  # of unknown length: whole passes only
    assert run.position.epochs_before == 2.0


def test_a_loader_without_a_length_raises_nothing(tmp_path):
    class Endless:
        def __iter__(self):
            return iter([0, 1, 2])

        def __len__(self):
            raise NotImplementedError

    model, optimizer = small()
    run = init()
    for number, _ in enumerate(run.steps(Endless()), 1):
        if number == 2:
            run.checkpoint(model, optimizer, directory=tmp_path)
    run = init()
    run.resume(model, optimizer, directory=tmp_path)
    assert list(run.steps(Endless())) == [2]
    assert run.position.epochs_before == 0.0


@pytest.mark.parametrize(("said", "kept"), [(2.5, 2.5), (-1, 0.0), (float("nan"), 0.0), ("none", 0.0), (1e9, 1e6)])
def test_a_script_with_its_own_checkpoints_reports_its_epoch_by_begin_at(said, kept):
    run = init()
    run.begin_at(said)
    assert run.position.epochs_before == kept


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(tmp_path):
    model, optimizer = small()
    run = init()
    run.checkpoint(model, optimizer, extra={"best": 0.5}, directory=tmp_path)
    assert run.resume(model, optimizer, directory=tmp_path).extra == {"best": 0.5}
    with pytest.raises(CheckpointError, match="does not fit this script"):
        run.resume(torch.nn.Linear(3, 1), directory=tmp_path)


def layers(*widths):
    model = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairwise(widths)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        (
            (2, 2, 1),
            (2, 2, 1),
            "ValueError: the saved optimizer is TulaOptimizer of SGD with groups of \\[4\\] weights, but the script's "
            "is TulaOptimizer of SGD with groups of \\[2, 2\\] weights",
        ),
        ((2, 2, 1), (2, 2, 3), "ValueError: .*mismatch .*\\[1, 2\\].*\\[3, 2\\]\\) for model.1.weight"),
        ((2, 2, 1), (2, 2, 1, 1), "ValueError: the checkpoint lacks model.2.bias, model.2.weight"),
        ((2, 2, 1, 1), (2, 2, 1), ".*the checkpoint has weights that the model lacks: model.2.bias, model.2.weight"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, then, now, why):
    model, inner = layers(*then)
    init().checkpoint(model, TulaOptimizer(inner), directory=tmp_path)
    model, inner = layers(*now)
    if then == now:
        inner = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.1, momentum=0.9)
    optimizer = TulaOptimizer(inner)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = init()
    sentence = rf"does not fit this script or cannot be read \({why}.*\): delete it, undo the change"
    with pytest.raises(CheckpointError, match=sentence):
        run.resume(model, optimizer, directory=tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(state["momentum_buffer"].any() for state in inner.state.values())


def test_a_checkpoint_of_a_plain_optimizer_is_refused_with_gradient_scaling(tmp_path):
    model, optimizer = layers(2, 1)
    init().checkpoint(model, optimizer, directory=tmp_path)
    with pytest.raises(CheckpointError, match=r"the saved optimizer is SGD .*, but the script's is TulaOptimizer"):
        init().resume(model, TulaOptimizer(optimizer), directory=tmp_path)


def test_a_checkpoint_of_another_wrapped_optimizer_is_refused(tmp_path):
    model, optimizer = layers(2, 1)
    init().checkpoint(model, TulaOptimizer(optimizer), directory=tmp_path)
    other = TulaOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"TulaOptimizer of SGD .*, but the script's is TulaOptimizer of AdamW"):
        init().resume(model, other, directory=tmp_path)


def test_a_directory_that_is_no_path_is_refused_in_one_sentence():
    sentence = r"^no checkpoint directory \(TypeError: .*\): set TULA_CHECKPOINT_DIR or pass directory=$"
    with pytest.raises(CheckpointError, match=sentence):
        init().checkpoint(torch.nn.Linear(3, 1), directory=5)


def test_a_missing_directory_raises_and_a_missing_checkpoint_is_reported(tmp_path, monkeypatch):
    monkeypatch.delenv("TULA_CHECKPOINT_DIR", raising=False)
    model, optimizer = small()
    with pytest.raises(CheckpointError, match="set TULA_CHECKPOINT_DIR"):
        init().checkpoint(model, optimizer)
    assert not init().resume(model, optimizer, directory=tmp_path).found


def test_every_generator_continues_where_it_was():
    import random

    import numpy

    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader([1, 2, 3], shuffle=True, generator=generator)

    def draw():
        return (torch.rand(1).item(), numpy.random.rand(), random.random(), torch.rand(1, generator=generator).item())

    random.gauss(0, 1)
    state = capture_randomness(loader)
    first = draw()
    restore_randomness(state, loader)
    assert draw() == first
