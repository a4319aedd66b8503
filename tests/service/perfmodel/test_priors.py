"""Tests that hardware figures give the first guess of a step time, corrected by the speed of earlier jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cold_start
from tests.support.configurations import make_configuration
from tula_service.perfmodel.points import Points, StepTimeObservations
from tula_service.perfmodel.priors import (
    UNKNOWN_PRECISION_SD,
    Hardware,
    Lessons,
    ModelFacts,
    Priors,
    ScaleError,
    StepTimePrior,
    generic_prior,
    prior_from_hardware,
    prior_from_jobs,
    prior_from_other_type,
    prior_of_type,
    scale_from_jobs,
)
from tula_service.perfmodel.step_time_form import log_terms
from tula_service.perfmodel.step_time_model import fit_step_time
from tula_wire.configurations import Variant

TABLE = Path(__file__).parents[2] / "data" / "single_device.csv"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    out = tmp_path_factory.mktemp("cold") / "out.json"
    assert cold_start.main(["--steps", str(TABLE), "--json", str(out), "--draws", "2"]) == 0
    return dict(json.loads(out.read_text(encoding="utf-8")))


def a_guess(**facts: Any) -> StepTimePrior:
    known = ModelFacts(25e6, 8e9, 40e6, 100e6, **{"rule_sd": UNKNOWN_PRECISION_SD, **facts})
    return prior_from_hardware(known, Hardware(15.7, 25.0, 900.0), reference_batch_size=128)


def test_hardware_figures_guess_measured_devices_within_the_stated_interval(figures):
    assert figures["cold.same.0.0.median"] < 0.25
    assert figures["cold.mixed.0.0.median"] < 0.2
    assert figures["cold.mixed.0.0.p90"] < 0.5
    assert 0.85 <= figures["cold.same.0.0.coverage"] <= 0.98


def test_networks_of_many_families_are_guessed_from_their_flops_activations_and_parameters():
    found = cold_start.mixed(cold_start.read(cold_start.FAMILIES))
    assert found["cold.mixed.0.0.median"] < 0.25
    assert found["cold.mixed.0.0.p90"] < 0.6


def test_earlier_jobs_take_away_large_misses_and_never_add_to_small_ones(figures):
    for history in ("same.1.0", "any.1.0", "same.0.5", "any.3.5"):
        assert figures[f"cold.{history}.median"] < figures[f"cold.{history}.without"] + 0.03
    assert figures["cold.same.1.0.p90"] < figures["cold.same.0.0.p90"]
    assert figures["cold.same.0.5.p90"] < 0.8 * figures["cold.same.0.0.p90"]


def test_a_row_of_unknown_precision_is_refused_by_name(tmp_path, capsys):
    table = tmp_path / "steps.csv"
    text = TABLE.read_text(encoding="utf-8")
    table.write_text(text.replace(",mixed,", ",int4,", 1), encoding="utf-8")
    with pytest.raises(SystemExit):
        cold_start.main(["--steps", str(table)])
    assert "precision 'int4' is unknown: use one of" in capsys.readouterr().err


def test_intervals_hold_with_any_history(figures):
    coverage = {key: value for key, value in figures.items() if key.endswith(".coverage")}
    assert len(coverage) == 2 * len(cold_start.HISTORIES)
    assert min(coverage.values()) >= 0.85


def test_a_first_guess_is_wider_by_what_is_guessed_in_it():
    sd = a_guess().sd[0]
    assert a_guess(flops_sd=1.0).sd[0] == pytest.approx(np.hypot(sd, 1.0))
    facts = ModelFacts(25e6, 8e9, 40e6, 100e6, rule_sd=UNKNOWN_PRECISION_SD)
    for hardware in (Hardware(), Hardware(15.7, 25.0, 900.0, figures_sd=1.0)):
        found = prior_from_hardware(facts, hardware, reference_batch_size=128)
        assert found.sd[0] == pytest.approx(np.hypot(sd, 1.0))


def test_compute_is_bound_by_arithmetic_or_by_bytes_and_starts_from_a_floor():
    def log_s(batch: float = 128.0, peak: float = 125.0, moved: float = 40e6) -> float:
        facts = ModelFacts(25e6, 8e9, moved, 100e6)
        guess = prior_from_hardware(facts, Hardware(peak, 25.0, 900.0), reference_batch_size=batch)
        return cold_start.log_step_s(guess)

    assert np.exp(log_s() - log_s(peak=15.7)) < 0.6, "on tensor cores"
    assert np.exp(log_s(moved=400e6) - log_s()) > 4.0
    assert np.exp(log_s(batch=1.0)) == pytest.approx(0.0345, rel=0.1), "launches, and the parameters"
    assert np.exp(log_s(batch=4096.0) - log_s(batch=1024.0)) == pytest.approx(4.0, rel=0.1)


def test_a_job_that_a_worse_rule_guessed_says_less_to_a_better_one():
    guess = a_guess(rule_sd=0.35)
    good, poor = (
        scale_from_jobs(guess, ScaleError(0.0, "here", rule_sd=0.35), [ScaleError(0.4, "here", rule_sd=sd)]).mean[0]
        for sd in (0.35, 0.8)
    )
    assert guess.mean[0] < poor < good < guess.mean[0] + 0.2


def test_gathering_parameters_again_in_the_backward_pass_is_half_as_much_communication_more():
    collective = [4, 6]  # within a node, between nodes
    more = a_guess(volumes=3.0).mean - a_guess().mean
    assert more[collective] == pytest.approx(np.log(1.5))
    assert not np.delete(more, collective).any()


@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_a_pipeline_of_p_stages_takes_m_plus_p_minus_one_micro_steps(micro_batches):
    stages, micro_batch = 4, 32  # so that the floor of launches has little effect
    prior = a_guess(idle_samples=(stages - 1.0) * micro_batch)
    batches = np.array([micro_batch, micro_batches * micro_batch], np.float64)
    points = Points(num_nodes=[1.0, 1.0], world_size=[1.0, 1.0], local_batch_size=batches)
    one, many = np.exp(log_terms(prior.mean, points, 128.0).compute)
    assert many / one == pytest.approx((micro_batches + stages - 1) / stages, rel=0.2)


def corrected(guess: StepTimePrior, earlier: Sequence[ScaleError], **known: float) -> StepTimePrior:
    return scale_from_jobs(guess, ScaleError(0.0, "here", **known), earlier)


def shift(earlier: Sequence[ScaleError]) -> float:
    guess = a_guess()
    return float(corrected(guess, earlier).mean[0] - guess.mean[0])


def test_without_earlier_jobs_the_guess_stays_what_it_is():
    guess = a_guess()
    assert corrected(guess, []) is guess


def test_a_job_on_the_same_device_counts_more_than_one_on_another_and_neither_counts_fully():
    assert 0.2 < shift([ScaleError(1.0, "there")]) < shift([ScaleError(1.0, "here")]) < 0.9


def test_one_job_corrects_by_its_share_of_all_that_varies():
    """The result is the posterior of a sum of normal variables if the jobs do not show how much networks differ."""
    everywhere, device, network = 0.5**2, 0.4**2, 0.5**2
    typical, rest = 0.5, everywhere + device + network
    for name, common in (("here", everywhere + device), ("there", everywhere)):
        found = corrected(a_guess(), [ScaleError(typical, name)])
        assert found.mean[0] - a_guess().mean[0] == pytest.approx(typical * common / rest, rel=0.05)
        assert found.sd[0] ** 2 == pytest.approx(rest - common**2 / rest, rel=0.1)


def test_jobs_on_one_other_device_say_less_of_this_one_than_jobs_on_many():
    one = shift([ScaleError(1.0, "there") for _ in range(6)])
    many = shift([ScaleError(1.0, f"there {number}") for number in range(6)])
    assert one < 0.8 * many


def test_a_device_whose_figures_are_a_guess_says_little_of_others_and_keeps_its_own_width():
    sure, unsure = (shift([ScaleError(1.0, "there", device_sd=sd)] * 3) for sd in (0.0, 1.0))
    assert 0.0 < unsure < 0.5 * sure
    facts = ModelFacts(25e6, 8e9, 40e6, 100e6)
    unknown = prior_from_hardware(facts, Hardware(), reference_batch_size=128)
    after = corrected(unknown, [ScaleError(0.3, "there")] * 8, device_sd=1.0)
    assert after.sd[0] > 1.0, "the speed of this device was not learned"
    assert corrected(unknown, [ScaleError(0.3, "here", device_sd=1.0)] * 8, device_sd=1.0).sd[0] < 0.6


def test_launches_and_links_take_as_long_as_before_beside_another_compute():
    guess = a_guess()
    found = corrected(guess, [ScaleError(0.8, "here")] * 4)
    assert found.mean[0] > guess.mean[0] + 0.4
    for entry in (1, 4, 6):
        assert found.mean[0] + found.mean[entry] == pytest.approx(guess.mean[0] + guess.mean[entry])
    assert found.basis == "prior"
    assert found.reference_batch_size == guess.reference_batch_size


def test_jobs_that_agree_narrow_the_interval_and_jobs_that_contradict_each_other_widen_it():
    guess = a_guess()
    agree = corrected(guess, [ScaleError(0.5, "here")] * 8)
    differ = corrected(guess, [ScaleError(0.5 + off, "here") for off in (-1.2, 1.2) * 4])
    assert agree.sd[0] < 0.75 * guess.sd[0]
    assert 1.1 * guess.sd[0] < differ.sd[0] < 2.0 * guess.sd[0]


def test_a_job_whose_flops_were_guessed_weighs_less_and_so_does_what_is_guessed():
    assert 0.0 < shift([ScaleError(1.0, "here", sd=1.0)]) < 0.6 * shift([ScaleError(1.0, "here")])
    wide = a_guess(flops_sd=1.0)
    assert corrected(wide, [ScaleError(1.0, "here")] * 8, sd=1.0).sd[0] > 1.0


@pytest.mark.parametrize("off", [-650.0, -7.0, 7.0, 30.0])
def test_a_job_that_was_described_in_another_unit_teaches_nothing_and_spoils_nothing(off: float):
    guess, sane = a_guess(), [ScaleError(0.5, "here"), ScaleError(0.4, "here")]
    assert corrected(guess, [ScaleError(off, "here")]) is guess
    found, alone = corrected(guess, [*sane, ScaleError(off, "here")]), corrected(guess, sane)
    assert (found.mean.tolist(), found.sd.tolist()) == (alone.mean.tolist(), alone.sd.tolist())


def test_the_correction_is_the_same_every_time_and_in_any_order():
    jobs = [ScaleError(float(off), "here" if off > 0 else f"{off}") for off in np.linspace(-1.0, 2.0, 7)]
    first, again, reversed_ = (corrected(a_guess(), each) for each in (jobs, jobs, jobs[::-1]))
    assert first.mean.tolist() == again.mean.tolist()
    assert first.sd.tolist() == again.sd.tolist()
    assert reversed_.mean[0] == pytest.approx(first.mean[0], abs=1e-9)


def test_a_network_from_an_unknown_processor_transfers_with_a_wide_interval():
    learnt = replace(a_guess(), sd=a_guess().sd * 0.1)
    gpu = Hardware(15.7, 25.0, 900.0)
    sure, unsure = (prior_from_other_type(learnt, Hardware(0.06, 25.0, 28.0, figures_sd=sd), gpu) for sd in (0.0, 1.0))
    assert sure.mean.tolist() == unsure.mean.tolist()
    assert unsure.sd[0] > 1.0 > sure.sd[0]


FLOOR, S_INTRA, S_INTER = 1, 4, 6


def learned(parameter: int, value: float, *, sd: float = 0.05, c: float = 0.0) -> StepTimePrior:
    """Return the posterior of a job that measured only its scale and one parameter."""
    base = generic_prior()
    mean, widths = base.mean.copy(), base.sd.copy()
    mean[0], widths[0] = c, 0.05
    mean[parameter], widths[parameter] = value, sd
    return replace(base, mean=mean, sd=widths, absolute=True, reference_batch_size=128.0)


def test_ten_jobs_that_never_left_one_gpu_teach_nothing_about_a_network():
    guess = a_guess()
    next_job = prior_from_jobs([learned(FLOOR, -1.0)] * 10, scale=guess, gradient_ratios=[1.0] * 10)
    for entry in (S_INTRA, S_INTER, 8):
        assert next_job.sd[entry] == pytest.approx(guess.sd[entry])
        assert next_job.mean[entry] == pytest.approx(guess.mean[entry])


def test_the_next_job_differs_from_others_as_they_differ_from_one_another():
    apart = prior_from_jobs([learned(FLOOR, value) for value in (-2.0, -1.0, -3.0, -2.0, -1.5, -2.5) * 3])
    agree = prior_from_jobs([learned(FLOOR, -2.0)] * 18)
    assert apart.sd[FLOOR] == pytest.approx(np.std([-2.0, -1.0, -3.0, -2.0, -1.5, -2.5]), rel=0.2)
    assert agree.sd[FLOOR] < 0.2 < apart.sd[FLOOR], "the error of the mean of 18 would be 0.15"
    assert apart.mean[FLOOR] == pytest.approx(-2.0, abs=0.1)


def test_collectives_carry_over_as_seconds_per_gradient_byte():
    """If a network takes twice as long but has a tenth of the parameters, its collectives take a tenth of the time."""
    scale = a_guess()
    other = learned(S_INTER, float(np.log(0.5)), c=float(scale.mean[0]) + float(np.log(2.0)))
    found = prior_from_jobs([other] * 5, scale=scale, gradient_ratios=[10.0] * 5)
    seconds = float(found.mean[0] + found.mean[S_INTER])
    assert seconds == pytest.approx(float(other.mean[0] + other.mean[S_INTER]) + np.log(10.0), abs=0.15)
    unknown = prior_from_jobs([other] * 5, scale=scale, gradient_ratios=[None] * 5)
    assert unknown.sd[S_INTER] == pytest.approx(scale.sd[S_INTER])


def test_a_collective_known_in_seconds_stays_so_whatever_compute_turns_out_to_be():
    """If compute on one GPU takes eight times as long as guessed, predicted times of collectives stay the same."""
    scale = a_guess()
    prior = prior_from_jobs([learned(S_INTER, 0.0, c=0.0)] * 5, scale=scale, gradient_ratios=[1.0] * 5)
    one = [make_configuration(1, 1, batch) for batch in (32, 128)]
    times = [8.0 * float(np.exp(scale.mean[0])) * batch / 128 for batch in (32, 128)]
    theta = (
        fit_step_time(StepTimeObservations.at(one, times), prior=Priors({"default": prior}))
        .posterior_for(Variant())
        .leading.theta
    )
    assert theta[0] > scale.mean[0] + 1.0
    assert theta[0] + theta[S_INTER] == pytest.approx(prior.mean[0] + prior.mean[S_INTER], abs=0.05)


def test_jobs_that_inherit_a_network_and_stay_on_one_gpu_do_not_make_the_next_surer_of_it():
    """One job measured the network; nine later jobs that use its result on one GPU do not count as measurements."""
    nodes = [make_configuration(n, 1, batch) for n in (1, 2, 4, 8) for batch in (32, 128)]
    times = [0.02 + 0.001 * c.local_batch_size + 0.05 * (c.num_nodes - 1) / c.num_nodes for c in nodes]
    lessons = [
        fit_step_time(StepTimeObservations.at(nodes, times), candidates=nodes).posterior_for(Variant()).without_prior()
    ]
    first = prior_from_jobs(lessons, scale=a_guess(), gradient_ratios=[1.0])
    for number in range(9):
        inherited = prior_from_jobs(lessons, scale=a_guess(), gradient_ratios=[1.0] * len(lessons))
        seen = StepTimeObservations.at(nodes[:2], [time * (1.0 + 0.1 * number) for time in times[:2]])
        model = fit_step_time(seen, prior=Priors({"default": inherited}), candidates=nodes)
        lessons.append(model.posterior_for(Variant()).without_prior())
    after = prior_from_jobs(lessons, scale=a_guess(), gradient_ratios=[1.0] * 10)
    assert after.sd[S_INTER] > 0.95 * first.sd[S_INTER]
    assert first.sd[S_INTER] < 0.6 * a_guess().sd[S_INTER], "this comes from the job that measured it"
    assert after.mean[0] + after.mean[S_INTER] == pytest.approx(first.mean[0] + first.mean[S_INTER], abs=0.1)
    assert after.sd[FLOOR] < first.sd[FLOOR], "this comes from what they measured"


def test_lessons_of_other_networks_count_until_three_cluster_sizes_were_measured():
    """After three cluster sizes, the job's own runs predict its collectives better than other networks do."""
    lessons = Lessons(other_networks={"default": ((learned(S_INTER, -1.0), 1.0),)})
    facts = ModelFacts(25e6, 4e9, 1e8, 1e8)
    hardware = {"default": Hardware(peak_tflops=15.0, inter_node_gbps=10.0, memory_gb_per_s=900.0)}

    def prior(measured_clusters):
        return prior_of_type(
            "default",
            facts,
            hardware,
            lessons,
            reference_batch_size=64.0,
            measured=True,
            measured_clusters=measured_clusters,
        )

    assert prior(1) is not None
    assert prior(2) is not None
    assert prior(3) is None
