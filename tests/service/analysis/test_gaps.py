"""Tests the sentences about information that measurements lack, and about measurements that contradict one another."""

from __future__ import annotations

import pytest

from tests.support.configurations import make_configuration
from tula_service.analysis.explanation import find_gaps
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.step_time_model import fit_step_time
from tula_wire import Configuration
from tula_wire.format import duration

GRID = [make_configuration(nodes, 4, batch) for nodes in (1, 2, 4, 8) for batch in (32, 64, 128, 256, 512)]


def step_time(c: Configuration) -> float:
    return 0.02 + 0.001 * c.local_batch_size + 0.01 * c.num_nodes


@pytest.mark.parametrize(
    ("configurations", "words"),
    [
        ([GRID[0]], "One configuration"),
        ([c for c in GRID if c.local_batch_size == 64], "same local batch"),
        ([c for c in GRID if c.num_nodes == 2], "same cluster size"),
    ],
)
def test_each_parameter_that_the_data_do_not_determine_is_named(configurations, words):
    (said,) = find_gaps(fit_step_time(StepTimeObservations.at(configurations, [*map(step_time, configurations)])))
    assert words in said


def test_repeats_that_contradict_one_another_are_named():
    repeated = [*GRID, GRID[0], GRID[0]]
    times = [*map(step_time, GRID), step_time(GRID[0]), 5 * step_time(GRID[0])]
    (said,) = find_gaps(fit_step_time(StepTimeObservations.at(repeated, times)))
    assert f"({duration(times[0])} to {duration(5 * times[0])})" in said
    assert "world size 4 and local batch 32 contradict" in said


def test_a_paper_form_that_too_little_was_measured_for_is_named():
    observed = StepTimeObservations.at(GRID[:1], [step_time(GRID[0])])
    asked, overlap = (" ".join(find_gaps(fit_step_time(observed, form=form))) for form in ("ring", "overlap"))
    assert "form ring of default needs two configurations" in asked
    assert "two configurations" not in overlap


@pytest.mark.parametrize(
    ("slow", "fast", "said"),
    [
        (
            make_configuration(1, 4, 128),
            make_configuration(4, 4, 128),
            "A step of 1 node at local batch 128 took 5 times as long",
        ),
        (
            make_configuration(2, 4, 8),
            make_configuration(2, 4, 128),
            "as one of 2 nodes at local batch 128, which has more work to do",
        ),
        (make_configuration(4, 4, 128), make_configuration(1, 4, 128), None),
        (make_configuration(1, 4, 128), make_configuration(4, 2, 128), None),
        (make_configuration(1, 4, 128), make_configuration(4, 4, 64), None),
        (make_configuration(1, 4, 128, 2), make_configuration(4, 4, 128, 1), None),
        (make_configuration(1, 4, 128, 1, "old"), make_configuration(4, 4, 128, 1, "new"), None),
    ],
)
def test_less_work_that_took_far_longer_is_said_to_have_run_under_other_conditions(slow, fast, said):
    notes = " ".join(find_gaps(fit_step_time(StepTimeObservations.at([slow, fast], [0.5, 0.1]))))
    if said is None:
        assert "Conditions must have differed" not in notes
    else:
        assert said in notes
        assert "measure both again" in notes
