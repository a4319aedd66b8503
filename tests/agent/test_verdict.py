"""Tests that the agent's log and the service give the same verdict on real training runs with one bottleneck each.

The verdict on memory has no test here, since a CPU has no allocator that reports its retries;
`tests/wire/test_verdict.py` tests that rule with such a reading. All delays are fractions of a step, and are large
compared with the delays that a busy machine adds.
"""

from __future__ import annotations

import re

import pytest

from tests.agent.conftest import Done, Launch
from tests.agent.sink import Sink
from tula_wire import HostFacts, read
from tula_wire.verdict import Steps, diagnose

SAID = re.compile(r"tula: (at the end, )?after (\d+) steps: ([A-Z][a-z-]+): (.+)")


def said(done: Done) -> list[tuple[str, str]]:
    """Return the diagnosis and text of each verdict in the log."""
    return [(name, text) for _, _, name, text in SAID.findall(done.stderr)]


def served(sink: Sink) -> str:
    """Return the service's diagnosis of the rows that the agent sent."""
    names = ("step", "step_time_s", "input_time_s", "exposed_comm_time_s", "skew_s", "straggler_rank")
    rows = []
    for body in sink.samples:
        if body["rank"] == 0 and not body["warmup"]:
            columns = [body.get(name, [None] * len(body["step"])) for name in names]
            rows += zip(*columns, strict=True)
    host = next(body["machine"] for body in sink.samples if "machine" in body)
    columns = [list(column) for column in zip(*sorted(rows, key=lambda row: row[0]), strict=True)]
    return diagnose(Steps(*columns[1:]), read(HostFacts, host)).diagnosis


def test_a_loader_that_is_slower_than_the_step_is_named_with_the_workers_to_add(sink: Sink, launch: Launch) -> None:
    done = launch("bound.py", "data")
    verdicts = said(done)
    assert {name for name, _ in verdicts} == {"Input-bound"}
    # Once, on busy cores: the shipping thread sees the hundredth step with the last, before or at the end of the run.
    places, steps = zip(*[(place, int(number)) for place, number, *_ in SAID.findall(done.stderr)], strict=True)
    assert places in (("", "at the end, "), ("at the end, ",), ("",)), "after 100 steps, and at the end"
    sent = [step for body in sink.samples for step in body["step"]]
    assert steps[-1] == max(sent), "the last verdict is on every step that was sent"
    assert "num_workers=0" in verdicts[0][1]
    assert re.search(r"(give the DataLoader \d workers? .* It saves \d+ % \[|It saves up to)", verdicts[0][1])
    assert served(sink) == "input_bound"


def test_a_step_that_only_computes_asks_for_nothing(sink: Sink, launch: Launch) -> None:
    assert said(launch("bound.py", "compute")) == [], "nothing is wrong, so nothing is warned of"
    assert served(sink) == "compute_bound"


def test_two_hundred_tiny_layers_are_bound_by_starting_them(sink: Sink, launch: Launch) -> None:
    for _ in range(3):  # on busy cores, a step may take long for other reasons, but not in each of three runs
        sink.requests.clear()
        if verdicts := said(launch("bound.py", "launches")):
            break
    assert {name for name, _ in verdicts} == {"Launch-bound"}
    assert served(sink) == "launch_bound"


def test_a_rank_that_takes_four_times_as_long_is_the_straggler(sink: Sink, launch: Launch) -> None:
    verdicts = said(launch("bound.py", "straggler", ranks=2))
    assert {name for name, _ in verdicts} == {"Straggler"}
    assert "rank 1" in verdicts[-1][1]
    assert served(sink) == "straggler"


def test_reductions_that_take_longer_than_the_rest_are_communication(sink: Sink, launch: Launch) -> None:
    verdicts = said(launch("bound.py", "communication", ranks=2))
    assert {name for name, _ in verdicts} == {"Communication-bound"}
    assert served(sink) == "communication_bound"


@pytest.mark.parametrize("by", ["nothing"])
def test_two_equal_ranks_wait_for_nothing_that_is_worth_a_change(sink: Sink, launch: Launch, by: str) -> None:
    assert said(launch("bound.py", by, ranks=2)) == []
    assert served(sink) in ("compute_bound", "healthy")
