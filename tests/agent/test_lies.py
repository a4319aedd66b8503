"""Tests that an invalid response changes nothing in training, and a valid one only what its values should change."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.agent.conftest import Done, Launch
from tests.agent.joining_rank import JoiningRank
from tests.agent.liar import WITHIN_S, Liar, Lie, deliveries, field_lies, lying

SCRIPT = "lied_to.py"
TRUTH = {
    "version": 7, "policy": None, "delta": 0.5, "small_batch_size": 4, "static_scale": 1.5,
    "s_min": 0.5, "s_max": 2.0,
}  # fmt: skip
POSSIBLE = {"version zero", *(f"{name} fraction" for name in ("delta", "static_scale", "s_min"))}
"""Lies that a true answer could hold."""
STEP_S, MEMORY_KIB = 1.0, 64 * 1024
"""What a lie may add to the longest step, and to the most memory. A slow answer goes on for `WITHIN_S`, and a bomb
takes seconds to unpack: a training that waits for either is above the first, and one that shares two busy cores is
below."""
NOWHERE = "http://127.0.0.1:9"


def impossible() -> list[Lie]:
    """Return responses that training must ignore: one invalid value beside values that would change training."""
    fields = [lie for lie in field_lies(TRUTH) if not lie.name.endswith("missing") and lie.name not in POSSIBLE]
    lies = [lie for lie in fields if not lie.name.startswith("s_max fraction")]
    return [*lies, *deliveries(), Lie("crossing", '{"s_min": 2.0, "s_max": 0.5}')]


def cost(done: Done) -> tuple[float, int]:
    """Return the longest pause in seconds and the peak memory in KiB of any rank."""
    found = [line.split()[1:] for line in done.printed("cost")]
    return max(float(pause) for pause, *_ in found), max(int(memory) for _, memory, _ in found)


def assert_costs_little(done: Done, without: Done, again: Callable[[], Done]) -> None:
    """Assert that a run costs about as much as without a service; repeat the run up to twice if a step took long."""
    (pause, memory), (usual_pause, usual_memory) = cost(done), cost(without)
    for _ in range(2):
        if pause > usual_pause + STEP_S:
            pause = min(pause, cost(again())[0])
    assert pause <= usual_pause + STEP_S
    assert memory <= usual_memory + MEMORY_KIB
    longest_s = max(float(line.split()[-1]) for line in done.printed("cost"))
    assert longest_s < WITHIN_S / 2, "an exchange has one deadline, of 0.3 s here"


@pytest.mark.parametrize(("ranks", "every"), [(0, 1), (2, 6)])
def test_no_impossible_answer_changes_a_training(launch: Launch, ranks: int, every: int) -> None:
    """The responses have invalid values in every field or are sent incorrectly; only the first rank reads them."""
    lies = impossible()[::every]
    count = str(len(lies))
    with lying(Liar({}, truth={"version": 0})) as honest:
        without = launch(SCRIPT, "--steps", count, ranks=ranks, TULA_URL=honest.url)
    posts = field_lies({"stored": 1, "duplicates": 0, "stop": False, "run_ended": False, "reason": None})

    def lied_to() -> Done:
        lies_by_path = {"/scaling": [*lies] * 5, "/samples": [*posts], "/telemetry": [*posts], "/run1": [*posts]}
        with lying(Liar(lies_by_path)) as liar:
            done = launch(SCRIPT, "--steps", count, "--answers", count, ranks=ranks, TULA_URL=liar.url)
        assert not lies_by_path["/scaling"], "not every lie was sent"
        return done

    done = lied_to()
    assert not done.printed("taken")
    assert done.printed("trained") == without.printed("trained")
    assert len(done.printed("trained")) == 5 * max(1, ranks)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("gradient-scaling values are ignored") == 5  # one warning per run
    assert_costs_little(done, without, lied_to)


def test_a_possible_answer_acts_as_if_the_script_had_given_it(launch: Launch) -> None:
    """All ranks apply the values from the same step on; a response that lacks a field is valid too."""
    possible = [lie for lie in field_lies(TRUTH) if lie.name.endswith("missing")]
    served = {"version": 7, "static_scale": 1.5, "s_max": 1.25, "small_batch_size": 2}
    arguments = ("--policies", "gain,ags,static", "--steps", "30")
    wanted = launch(SCRIPT, *arguments, "--apply", json.dumps(served), ranks=2, TULA_URL=NOWHERE)
    with lying(Liar({"/scaling": [Lie("possible", json.dumps(served))] * 120})) as liar:
        done = launch(SCRIPT, *arguments, "--answers", "1", ranks=2, TULA_URL=liar.url)
    assert done.printed("trained") == wanted.printed("trained")
    assert " True 7 " in done.printed("trained")[0]
    with lying(Liar({"/scaling": possible * 3})) as liar:
        done = launch(SCRIPT, *arguments, "--answers", str(len(possible)), ranks=2, TULA_URL=liar.url)
    assert {line.split()[2:4] == ["30", "True"] for line in done.printed("trained")} == {True}


@pytest.mark.parametrize("delivery", ["endless", "bomb", "drip"])
def test_answers_to_measurements_cost_neither_memory_nor_time(launch: Launch, delivery: str) -> None:
    """An endless response once took gigabytes, a compressed one stalled training, and a slow one never ended."""
    arguments = ("--policies", "none", "--steps", "200")
    without = launch(SCRIPT, *arguments, TULA_URL=NOWHERE)

    def lied_to() -> Done:
        with lying(Liar({}, forever=delivery)) as liar:
            return launch(SCRIPT, *arguments, TULA_URL=liar.url)

    done = lied_to()
    assert done.printed("trained") == without.printed("trained")
    assert_costs_little(done, without, lied_to)


JOB_ID, RUN_ID, NAME = "job-7", "run-7", "a known job"
JOINING: dict[str, Any] = {
    f"/jobs/{JOB_ID}/runs": {"id": RUN_ID, "runs": []},
    "/jobs": {"jobs": [{"id": JOB_ID, "name": NAME}], "job": {"id": JOB_ID}},
}
"""True answers to an agent that makes a run of a job by itself, by the ends of their paths."""
IDS = [
    Lie(f"id {text}", text)
    for text in ('".."', '"../tokens"', '"a/b"', '""', '"a\\u0000b"', f'"{"x" * 201}"', "null", "7")
]


def joining_lies() -> list[tuple[str, Lie]]:
    """Return (path, lie) pairs for a joining rank: each invalid id, each invalid field and each incorrect delivery."""
    lies = [(f"/jobs/{JOB_ID}/runs", Lie(lie.name, f'{{"id": {lie.text}}}')) for lie in IDS]
    lies += [("/jobs", Lie(lie.name, f'{{"jobs": [{{"name": "{NAME}", "id": {lie.text}}}]}}')) for lie in IDS]
    lies += [("/jobs", Lie(lie.name, f'{{"jobs": [], "job": {{"id": {lie.text}}}}}')) for lie in IDS]
    lies.append(("/jobs", Lie("an entry", '{"jobs": [7]}')))
    at_once = [lie for lie in deliveries() if "drip" not in lie.name]
    for path, truth in JOINING.items():
        lies += [(path, lie) for lie in [*field_lies(truth), *at_once]]
    return lies


def test_no_answer_to_a_rank_that_joins_raises_or_leads_to_another_path() -> None:
    """An id of `..` once changed the path of a request with the agent's token. The job is given by name or by id."""
    for (path, lie), job in itertools.product(joining_lies(), (NAME, JOB_ID)):
        if (path, job) == ("/jobs", JOB_ID):
            continue  # which is not asked for
        lies = [lie, lie]  # a job that is not in a list is registered by another request
        with lying(Liar({path: lies}, truths=JOINING)) as liar:
            rank = JoiningRank(dist.HashStore(), 0, liar.url, job=job, world_size=1)
            rank.joining.ready(last=False)
        assert len(lies) < 2, f"{lie.name} was not sent"
        assert rank.joining.run_id in (None, RUN_ID, "boom"), lie.name
        assert set(liar.paths) <= {"/v1/jobs", *(f"/v1/jobs/{each}/runs" for each in (JOB_ID, "boom"))}, lie.name


def test_no_answer_to_a_joining_training_changes_it(launch: Launch) -> None:
    """Responses are late, endless or invalid; only a refused join is not attempted again."""
    arguments = ("--steps", "20", "--job", NAME)
    without = launch(SCRIPT, *arguments, ranks=2, TULA_URL=NOWHERE, TULA_RUN_ID="")

    def lied_to() -> Done:
        lies = {path: [*deliveries(), *IDS[:2]] for path in JOINING}
        with lying(Liar(lies, truths=JOINING)) as liar:
            done = launch(SCRIPT, *arguments, "--answers", "12", ranks=2, TULA_URL=liar.url, TULA_RUN_ID="")
        assert lies == {path: [] for path in JOINING}, "not every lie was sent"
        assert any(path.startswith(f"/v1/runs/{RUN_ID}") for path in liar.paths), "the last training joined"
        return done

    done = lied_to()
    assert done.printed("trained") == without.printed("trained")
    assert len(done.printed("trained")) == 5 * 2
    assert_costs_little(done, without, lied_to)


def test_a_run_id_that_is_none_is_not_taken_from_another_rank() -> None:
    store = dist.HashStore()
    first, other = (JoiningRank(store, rank, "http://127.0.0.1:9") for rank in (0, 1))
    assert not other.joining.ready(last=False)
    first.channel().set("run/2", "..")
    other.joining.ready(last=False)
    assert other.joining.run_id is None
