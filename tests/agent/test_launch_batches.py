"""Tests that one launch measures several local batch sizes, each as a separate run, if its batches can be cut."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from tests.agent.conftest import Launch
from tests.agent.sink import Sink
from tula_agent.batches import first_examples
from tula_agent.config import read_config
from tula_agent.run import Run
from tula_agent.scaling import TulaOptimizer

SEVERAL = {
    "TULA_SMALLER_BATCHES": "2=small,4=middle",
    "TULA_LOCAL_BATCH_SIZE": "8",
    "TULA_WARMUP_STEPS": "2",
    "TULA_MEASURE_STEPS": "6",
}
Pair = namedtuple("Pair", "x y")


@dataclass
class Examples:
    x: torch.Tensor
    names: list[str]
    scale: float = 2.0


class Encoding(UserDict[str, Any]):
    """A stand-in for the BatchEncoding of transformers."""


def measured(sink: Sink) -> dict[str, list[tuple[int, int]]]:
    """Return, for each run, the (local batch size, measured steps) of the first rank's requests in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for _, path, body in sink.requests:
        if path.endswith("/samples") and body["rank"] == 0 and not body["warmup"]:
            found.setdefault(path.split("/")[3], []).append((body["local_batch_size"], len(body["step"])))
    return found


def totals(sink: Sink) -> dict[str, tuple[set[int], int]]:
    return {run: ({size for size, _ in bodies}, sum(n for _, n in bodies)) for run, bodies in measured(sink).items()}


def states(sink: Sink, run: str) -> list[str]:
    return [body["state"] for method, path, body in sink.requests if method == "PATCH" and path.endswith(f"/{run}")]


HARD = ("--uneven", "--accumulate", "2", "--no-sync", "--amp")


@pytest.mark.parametrize("more", [(), HARD])
def test_two_ranks_measure_three_batches_in_one_launch(sink: Sink, launch: Launch, more: tuple[str, ...]) -> None:
    done = launch("train.py", "--epochs", "1", "--batches", "6", *more, ranks=2, **SEVERAL)
    assert not sink.invalid
    found = totals(sink)
    assert {run: sizes for run, (sizes, _) in found.items()} == {"small": {2}, "middle": {4}, "run1": {8}}
    assert more or {steps for _, steps in found.values()} == {6}
    assert states(sink, "small") == states(sink, "middle") == ["running", "succeeded"]
    assert states(sink, "run1") == ["running", "succeeded"]
    order = [path.split("/")[3] for method, path, body in sink.requests if body.get("state") == "succeeded"]
    assert order == ["small", "middle", "run1"]
    counts = {line.split()[2] for line in done.printed("micro-steps")}
    assert counts == {str(24 * (2 if more else 1))}
    assert len({line.split()[2] for line in done.printed("weights")}) == 1
    with_memory = {(path.split("/")[3], body["rank"]) for _, path, body in sink.requests if "memory" in body}
    assert with_memory == {(run, rank) for run in ("small", "middle", "run1") for rank in (0, 1)}


def test_buckets_of_a_further_batch_are_timed_in_its_first_five_steps(sink: Sink, launch: Launch) -> None:
    launch("train.py", "--epochs", "1", ranks=2, **SEVERAL | {"TULA_MEASURE_STEPS": "3"})
    assert not sink.invalid
    assert [path.split("/")[3] for _, path, body in sink.requests if "timeline" in body] == ["middle", "run1"]


def test_a_network_is_compiled_again_in_the_warm_up_of_each_batch_and_each_ends_when_the_service_has_enough(
    sink: Sink, launch: Launch
) -> None:
    sink.stop = True
    steps = ("--norm", "--compile", "--examples", "--epochs", "1", "--pause", "0.01")
    launch("train.py", *steps, ranks=2, **SEVERAL | {"TULA_MEASURE_STEPS": "5000"})
    assert not sink.invalid
    found = totals(sink)
    assert {run: sizes for run, (sizes, _) in found.items()} == {"small": {2}, "middle": {4}, "run1": {8}}
    assert max(measured for _, measured in found.values()) < 5000
    for run in found:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _, path, body in sink.requests:
            if path == f"/v1/runs/{run}/samples":
                times[body["warmup"]] += body["step_time_s"]
        assert max(times[True]) > quantiles(times[False], n=20)[-1], "but for what a busy host adds to one in twenty"


def test_ranks_of_which_one_is_late_change_to_the_next_batch_at_the_same_step_once_the_first_has_enough(
    sink: Sink, launch: Launch
) -> None:
    precise = {"TULA_WARMUP_STEPS": "5", "TULA_MEASURE_STEPS": "400", "TULA_PRECISION": "0.5"}
    done = launch("train.py", "--late", "1", "--epochs", "1", ranks=2, **SEVERAL | precise)
    assert not sink.invalid
    steps: dict[tuple[str, int], list[int]] = {}
    warm_up: dict[str, int] = {}
    for _, path, body in sink.requests:
        if path.endswith("/samples"):
            run = path.split("/")[3]
            steps.setdefault((run, body["rank"]), []).extend(body["step"])
            if body["warmup"] and body["rank"] == 0:
                warm_up[run] = warm_up.get(run, 0) + len(body["step"])
    assert warm_up == {"small": 5, "middle": 3, "run1": 3}
    for run in warm_up:
        assert max(steps[run, 0]) == max(steps[run, 1])  # of other ranks, the steps with a reading of memory arrive
        assert len(steps[run, 0]) < 400
    assert len({line.split()[2] for line in done.printed("micro-steps")}) == 1
    assert len({line.split()[2] for line in done.printed("weights")}) == 1


def test_out_of_memory_ends_the_launch_with_the_smaller_batches_measured(sink: Sink, launch: Launch) -> None:
    launch("train.py", "--at", "11:oom", expect=None, **SEVERAL)
    assert states(sink, "small") == ["running", "succeeded"]
    assert states(sink, "middle") == ["running", "out_of_memory"]
    assert states(sink, "run1") == ["running"]
    assert [body["failed_local_batch_size"] for _, _, body in sink.requests if "failed_local_batch_size" in body] == [4]


def test_a_script_that_leaves_early_reports_no_batch_that_it_did_not_finish(sink: Sink, launch: Launch) -> None:
    launch("train.py", "--at", "11:leave", expect=3, **SEVERAL)
    assert states(sink, "small") == ["running", "succeeded"]
    assert states(sink, "middle") == ["running", "failed"]
    assert states(sink, "run1") == ["running"]


def test_batches_that_cannot_be_cut_are_measured_whole_with_one_message(
    sink: Sink, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(read_config(environment | SEVERAL))
    packed = [(torch.zeros(8, 3), torch.zeros(11))] * 3
    sizes = [len(x) for x, _ in run.steps(packed)]
    run.finish()
    assert sizes == [8] * 8
    assert totals(sink) == {"run1": ({8}, 6)}
    assert states(sink, "small") == []
    assert len([r for r in caplog.records if "measures one batch size instead of several" in r.message]) == 1


def test_ranks_that_cannot_agree_measure_the_whole_batch_and_give_the_smaller_one_back(
    sink: Sink, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # of another process that this one can't reach
    run = Run(read_config(environment | SEVERAL | {"WORLD_SIZE": "2"}))
    sizes = [len(x) for x in run.steps([torch.zeros(8)] * 9)]
    run.finish()
    assert sizes == [2, 2, 2, *[8] * 6]
    assert states(sink, "small") == ["running", "pending"]
    assert [path.split("/")[3] for _, path, body in sink.requests if body.get("local_batch_size") == 8] == ["run1"]


@pytest.mark.parametrize(
    ("batch", "cut"),
    [
        (torch.arange(6), torch.arange(2)),
        ([torch.arange(6), torch.ones(6, 3)], [torch.arange(2), torch.ones(2, 3)]),
        (
            {"x": torch.arange(6), "names": list("abcdef"), "scale": 3},
            {"x": torch.arange(2), "names": ["a", "b"], "scale": 3},
        ),
        (
            Pair(torch.arange(6), (torch.tensor(1.0), torch.ones(6))),
            Pair(torch.arange(2), (torch.tensor(1.0), torch.ones(2))),
        ),
        ([torch.ones(3, 4 + n) for n in range(6)], [torch.ones(3, 4), torch.ones(3, 5)]),
        (Examples(torch.arange(6), list("abcdef")), Examples(torch.arange(2), ["a", "b"])),
        (Encoding(x=torch.arange(6)), Encoding(x=torch.arange(2))),
    ],
)
def test_a_batch_is_cut_to_its_first_examples_and_stays_as_it_was(batch: Any, cut: Any) -> None:
    before = repr(batch)
    found = first_examples(batch, 6, 2)
    assert type(found) is type(batch)
    assert repr(found) == repr(cut)
    assert repr(batch) == before


@pytest.mark.parametrize(
    "batch",
    [{"x": torch.ones(6), "graph": torch.ones(17)}, pack_sequence([torch.ones(1)] * 6), [torch.ones(6, 2)] * 6],
)
def test_a_batch_whose_parts_are_not_all_of_its_length_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError):
        first_examples(batch, 6, 2)


def test_the_noise_scale_of_smaller_batches_is_the_same_with_a_given_global_batch_size(
    environment: dict[str, str],
) -> None:
    noise: dict[int | None, list[tuple[int, float]]] = {}
    for given in (None, 16):
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.zeros(64))
        optimizer = TulaOptimizer(torch.optim.SGD([weight], lr=0.0), policy="measure", global_batch_size=given)
        run = Run(read_config(environment | SEVERAL | {"TULA_GRAD_ACCUM_STEPS": "2"}))
        run.watch(torch.nn.Linear(1, 1), optimizer)
        noise[given] = []
        for number, batch in enumerate(run.steps(0.1 + torch.randn(48, 8, 64))):
            ((batch @ weight).mean() / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                found = optimizer.telemetry().get("gradient_noise_scale", 0.0)
                noise[given].append((len(batch), found))
        run.finish()
        optimizer.close()
    assert noise[16] == noise[None]
    assert {size for size, found in noise[16] if found > 0.0} == {2, 4, 8}
