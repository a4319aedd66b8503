"""Tests that the step timer finds the boundaries of steps in any training loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.batches import BatchSizes, batch_bytes, infer_batch_size, infer_sequence_length
from tula_agent.measure.step_timer import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


durations = st.tuples(st.floats(0.001, 2), st.floats(0.001, 2))


@given(st.lists(durations, min_size=1, max_size=30), st.integers(1, 5))
def test_steps_add_up_to_the_time_that_passed(parts: list[tuple[float, float]], accumulate: int) -> None:
    clock = Clock()
    timer = StepTimer(accumulate, clock)
    steps = [timer.want_batch()]
    for input_s, work_s in parts:
        clock.now += input_s
        timer.batch_ready(8)
        clock.now += work_s
        steps.append(timer.want_batch())
    ended = [step for step in steps if step is not None]
    assert len(ended) == len(parts) // accumulate
    whole = parts[: len(ended) * accumulate]
    assert math.isclose(sum(step.step_time_s for step in ended), sum(map(sum, whole)), abs_tol=1e-6)
    assert math.isclose(sum(step.input_time_s for step in ended), sum(i for i, _ in whole), abs_tol=1e-6)
    assert [step.step for step in ended] == list(range(len(ended)))


def test_a_watched_optimizer_ends_steps_and_teaches_the_accumulation() -> None:
    timer = StepTimer(None, Clock())
    timer.watched = True
    timer.want_batch()
    micro_steps = []
    for index in range(12):
        timer.batch_ready(4)
        if index % 3 == 2 and index != 8:  # at 8 a GradScaler finds an inf and skips
            timer.optimizer_stepped()
        step = timer.want_batch()
        if step is not None:
            micro_steps.append(step.micro_steps)
    assert micro_steps == [3, 3, 3, 3]


def micro_steps_of(timer: StepTimer, stepping: list[bool]) -> list[int]:
    """Return the micro-steps of each completed step; `stepping` says after which batches the optimizer steps."""
    timer.watched = True
    timer.want_batch()
    found = []
    for steps in stepping:
        timer.batch_ready(4)
        if steps:
            timer.optimizer_stepped()
        step = timer.want_batch()
        if step is not None:
            found.append(step.micro_steps)
    return found


def test_the_optimizer_s_steps_count_and_not_the_configured_number() -> None:
    assert micro_steps_of(StepTimer(1, Clock()), [False, False, True] * 4) == [3, 3, 3, 3]
    assert micro_steps_of(StepTimer(4, Clock()), [False, True] * 4) == [2, 2, 2, 2]


def test_steps_skipped_at_the_start_are_seen_apart_after_two_that_are_not() -> None:
    assert micro_steps_of(StepTimer(1, Clock()), [False, True, True, True, False, False, True]) == [2, 1, 1, 1, 1, 1]


def test_an_optimizer_that_is_never_seen_to_step_ends_steps_by_the_configured_count() -> None:
    assert micro_steps_of(StepTimer(2, Clock()), [False] * 24) == [16, 2, 2, 2, 2]


def test_time_between_two_loops_belongs_to_no_step() -> None:
    clock = Clock()
    timer = StepTimer(1, clock)
    for _ in range(2):
        timer.want_batch()
        timer.batch_ready(4)
        clock.now += 1.0
        step = timer.want_batch()
        assert step is not None
        assert step.step_time_s == pytest.approx(1.0)
        timer.pause()
        clock.now += 500.0  # evaluation


def test_batches_of_every_shape_are_sized() -> None:
    tensor = torch.zeros(6, 2)
    for batch in (tensor, [tensor, tensor], (tensor,), {"x": tensor, "y": tensor}, {"deep": {"x": [tensor]}}):
        assert infer_batch_size(batch) == 6
    assert infer_batch_size({"scalar": torch.tensor(1.0), "x": tensor}) == 6
    assert BatchSizes().of(["words"], torch.utils.data.DataLoader([1] * 9, batch_size=3)) == 3
    assert infer_batch_size(object()) is None
    assert batch_bytes([tensor, {"y": tensor.half()}]) == 6 * 2 * 4 + 6 * 2 * 2


def test_the_length_of_sequences_of_tokens_is_seen_and_of_nothing_else() -> None:
    tokens, image, labels = torch.zeros(6, 512, dtype=torch.int64), torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)
    for batch in ({"input_ids": tokens, "labels": labels}, (tokens, tokens), [tokens, tokens.int()]):
        assert infer_sequence_length(batch) == 512
    categories = torch.zeros(6, 26, dtype=torch.int64)
    others = (tokens, (image, labels), (image, image), (categories, labels), (categories, image), ("a", "b"), {}, None)
    assert [infer_sequence_length(batch) for batch in others] == [None] * len(others)


@pytest.mark.parametrize("where", ["in a step", "while waiting for data"])
def test_time_left_out_belongs_to_no_step(where: str) -> None:
    clock = Clock()
    timer = StepTimer(1, clock)
    timer.want_batch()
    for moment in ("while waiting for data", "in a step"):
        clock.now += 0.25
        if where == moment:
            timer.leave_out()
            clock.now += 60.0
            timer.count_again()
        if moment == "while waiting for data":
            timer.batch_ready(8)
    step = timer.want_batch()
    assert step is not None
    assert (step.step_time_s, step.input_time_s) == (0.5, 0.25)


def test_a_loop_that_is_left_while_time_is_left_out_begins_at_its_next_batch() -> None:
    clock = Clock()
    timer = StepTimer(1, clock)
    timer.want_batch()
    timer.batch_ready(8)
    timer.leave_out()
    clock.now += 60.0
    timer.pause()
    timer.want_batch()
    clock.now += 0.5
    timer.count_again()
    timer.batch_ready(8)
    clock.now += 0.5
    step = timer.want_batch()
    assert step is not None
    assert (step.step_time_s, step.input_time_s) == (1.0, 0.5)
