"""Tests what a job learns from earlier jobs of its project; each network counts once on each device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec
from tests.support.configurations import make_configuration
from tula_service.analysis import hardware, transfer
from tula_service.analysis.hardware import look_up_figures, look_up_hardware, read_facts, same_hardware
from tula_service.analysis.job_data import JobData
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.priors import Lesson, Lessons, StepTimePrior
from tula_service.perfmodel.step_time_model import fit_step_time
from tula_service.usecases.job_data import load_job_data
from tula_wire.configurations import Variant
from tula_wire.devices import DEVICES

MODEL = fit_step_time(
    StepTimeObservations.at(
        [make_configuration(1, 2, 32, 1, "node"), make_configuration(1, 2, 256, 1, "node")], [0.1, 0.5]
    )
)


def asked(network: str, accelerator: str | None, **more: Any) -> wire.JobSpec:
    on = {"instance_type": "node", "max_nodes": 2, "ranks_per_node": 2, "accelerator": accelerator}
    return spec(cluster=on, model={"name": network, "flops_per_sample": 24e9}, **more)


def remember(cluster: Cluster, *wanted: wire.JobSpec) -> None:
    for each in wanted:
        job_id = cluster.register(each).job.id
        with cluster.store.transaction() as tx:
            tx.posteriors.put_posteriors(job_id, transfer.export_posteriors(MODEL))


def lessons_for(cluster: Cluster, wanted: wire.JobSpec) -> Lessons:
    job_id = cluster.register(wanted).job.id
    with cluster.store.reading() as tx:
        data = load_job_data(tx, tx.jobs.get(job_id))
    return transfer.earlier_evidence(data, look_up_figures(data)).lessons


def test_a_network_that_was_tuned_again_and_again_counts_once_on_each_device(cluster: Cluster) -> None:
    again = [asked("net", "V100-16GB", epochs=epochs) for epochs in (1, 2, 3)]
    remember(cluster, *again, asked("net", "Tesla V100", epochs=4), asked("net", "T4"), asked("other", "V100-16GB"))
    found = lessons_for(cluster, asked("new", "V100-16GB"))
    devices = [lesson.hardware.device for lesson in found.scales]
    assert devices == ["V100", "T4", "V100"], "of the other network, and twice of this"
    assert len(found.other_networks["node"]) == 4, "each of them shows the shape of scaling on this hardware"


def test_many_runs_of_one_network_narrow_a_first_guess_no_more_than_one(cluster: Cluster) -> None:
    def width(accelerator: str) -> float:
        chosen = cluster.register(asked(f"new {accelerator}", accelerator)).recommendation.chosen
        assert chosen is not None
        return chosen.step_time_s.high / chosen.step_time_s.low

    remember(cluster, asked("net", "T4"), *(asked("net", "V100-16GB", epochs=epochs) for epochs in range(1, 5)))
    assert width("V100-16GB") == pytest.approx(width("T4"), rel=0.3)


def test_a_job_whose_first_values_differ_teaches_what_these_switches_are_believed_to_leave(cluster: Cluster) -> None:
    def guess(precision: str, workers: str) -> wire.Estimate:
        options = {"precision": [precision, "amp"], "num_workers": [workers, "16"]}
        chosen = cluster.register(asked("net", "V100", options=options)).recommendation.chosen
        assert chosen is not None
        return chosen.step_time_s

    remember(cluster, asked("net", "V100", options={"precision": ["bf16", "fp32"], "num_workers": ["4", "8"]}))
    alike, other_loader, single = guess("bf16", "4"), guess("bf16", "8"), guess("fp32", "4")
    assert other_loader.value == pytest.approx(alike.value, rel=1e-3)
    assert other_loader.high == pytest.approx(alike.high, rel=0.01)
    assert 1.2 < single.value / alike.value < 1.8, "half precision is believed to take 0.6 of single"
    assert single.high / single.low > 1.1 * alike.high / alike.low


def test_a_run_on_a_processor_says_less_of_an_accelerator_than_a_data_sheet(cluster: Cluster) -> None:
    def step_s(network: str) -> float:
        chosen = cluster.register(asked(network, "A100")).recommendation.chosen
        assert chosen is not None
        return chosen.step_time_s.value

    remember(cluster, asked("net", "CPU"))
    assert 0.5 < step_s("net") / step_s("other") < 2.0, "the data sheet of the A100 tells more"
    remember(cluster, asked("net", "V100"), asked("net", "CPU", epochs=2))
    from_v100 = MODEL.predict([make_configuration(1, 2, 256, 1, "node")]).mean_s[0] * 900.0 / 1555.0
    answer = cluster.register(asked("net", "A100", epochs=3)).recommendation
    at = {c.configuration: c.step_time_s.value for c in answer.candidates}
    found = at[wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=256, instance_type="node")]
    assert found == pytest.approx(from_v100, rel=0.2)


KNOWN = {"name": "net", "flops_per_sample": 60e9}
GUESSED = {"name": "net", "parameters": round(60e9 / 900)}  # the same FLOPs, if the rule of thumb holds
LEARNT = MODEL.posteriors[Variant("node")].as_prior()


def first_guess(wanted: wire.JobSpec, *earlier: tuple[dict[str, Any], StepTimePrior]) -> StepTimePrior:
    scales = tuple(
        Lesson(learnt, read_facts(wire.ModelSpec.model_validate(model)), look_up_hardware(one("V100")))
        for model, learnt in earlier
    )
    known = transfer.EarlierEvidence(Lessons(scales=scales))
    figures = look_up_figures(JobData(spec=wanted, objective=wanted.objective, data_version=1))
    candidates = [make_configuration(1, 2, 256, 1, "node")]
    return transfer.build_priors(known, figures, wanted, candidates, observed=None).believed["node"]


def test_an_earlier_job_of_which_less_is_known_corrects_less() -> None:
    wanted = asked("new", "V100")
    alone = first_guess(wanted).mean[0]
    loose = replace(LEARNT, sd=LEARNT.sd + 1.0, covariance=None)
    sure, guessed, open_ = (
        abs(first_guess(wanted, earlier).mean[0] - alone)
        for earlier in ((KNOWN, LEARNT), (GUESSED, LEARNT), (KNOWN, loose))
    )
    assert 0.1 < guessed < 0.6 * sure
    assert 0.1 < open_ < 0.6 * sure


def test_whatever_earlier_jobs_say_a_guess_of_what_is_not_known_stays_wide() -> None:
    earlier = [(KNOWN, LEARNT)] * 8
    unknown_flops = spec(cluster=[one("T4").model_dump()], model={"name": "new"})
    assert first_guess(asked("new", "T4"), *earlier).sd[0] < 0.8
    assert first_guess(unknown_flops, *earlier).sd[0] > 1.0
    assert first_guess(asked("new", None), *earlier).sd[0] > 1.0


def one(accelerator: str | None, instance_type: str = "node") -> wire.ClusterSpec:
    return wire.ClusterSpec(instance_type=instance_type, max_nodes=1, accelerator=accelerator)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (one("V100-16GB"), one("Tesla V100-SXM2-32GB", "other"), True),
        (one("rtx 2080 Ti"), one("2080Ti", "other"), True),
        (one("Gaudi 2"), one("GAUDI2", "other"), True),
        (one("A100-40GB"), one("A10G"), False),
        (one("CPU"), one("cpu"), True),
        (one("CPU"), one("CPU", "other"), False),
        (one(None), one(None), True),
        (one(None), one(None, "other"), False),
        (one(None), one("V100"), False),
    ],
)
def test_ranks_run_on_the_same_device_where_its_name_says_so(
    first: wire.ClusterSpec, second: wire.ClusterSpec, same: bool
) -> None:
    assert (look_up_hardware(first).device == look_up_hardware(second).device) is same


def test_a_name_that_only_begins_like_a_known_device_is_not_taken_for_it() -> None:
    known = {
        name: look_up_hardware(one(name)).peak_tflops
        for name in ("A40", "RTX A4000", "T4", "Quadro T400", "A10", "A16")
    }
    assert known == {"A40": 37.4, "RTX A4000": None, "T4": 8.1, "Quadro T400": None, "A10": 31.2, "A16": None}


def test_a_processor_is_of_uncertain_speed_and_an_accelerator_is_not() -> None:
    assert look_up_hardware(one("CPU")).device_sd == look_up_hardware(one(None)).device_sd == 1.0
    assert look_up_hardware(one("V100")).device_sd == 0.0


@pytest.mark.parametrize(
    ("mine", "like"),
    [
        ({}, True),
        ({"memory_bytes_per_rank": 16 * 2**30}, False),
        ({"ranks_per_node": 8}, False),
        ({"network_gbps": 25}, False),
        ({"instance_type": "a", "ranks_per_node": 8}, False),
    ],
)
def test_unnamed_hardware_is_the_same_only_if_its_whole_description_agrees(mine: dict[str, Any], like: bool) -> None:
    said = wire.ClusterSpec.model_validate({"max_nodes": 4, "ranks_per_node": 1})
    assert same_hardware(said, wire.ClusterSpec.model_validate({"max_nodes": 2, "ranks_per_node": 1} | mine)) is like


def test_named_hardware_is_the_same_whatever_the_number_of_ranks() -> None:
    four, eight = (
        wire.ClusterSpec.model_validate({"instance_type": "p3", "max_nodes": 4, "ranks_per_node": ranks})
        for ranks in (4, 8)
    )
    assert same_hardware(four, eight)


@pytest.mark.parametrize(("earlier", "wanted"), [(25_000_000, None), (None, 25_000_000), (25_000_000, 25_000_000)])
def test_a_network_is_known_by_its_name_if_only_one_job_gives_its_parameters(
    cluster: Cluster, earlier: int | None, wanted: int | None
) -> None:
    def of(parameters: int | None, **more: Any) -> wire.JobSpec:
        return asked("net", "V100-16GB", **more).model_copy(
            update={"model": wire.ModelSpec(name="net", parameters=parameters)}
        )

    remember(cluster, of(earlier))
    assert list(lessons_for(cluster, of(wanted, epochs=3)).same_network) == ["node"]
    assert not lessons_for(cluster, of(7, epochs=4)).same_network or earlier is None


def test_an_accelerator_without_a_data_sheet_is_named_beside_those_that_have_one() -> None:
    warnings = " ".join(hardware.describe_guesses(asked("net", "Zorg-9000")))
    assert "no data sheet for Zorg-9000" in warnings
    assert "A100, " in warnings
    assert "set cluster.accelerator, for example" in " ".join(hardware.describe_guesses(asked("net", None)))


def test_every_device_has_a_source_and_precisions_in_order_of_speed() -> None:
    for name, device in DEVICES.items():
        assert device.source, name
        assert device.fp32 <= (device.tf32 or device.fp32) <= (device.fp16 or device.tf32 or device.fp32), name
        assert device.peak in (device.fp32, device.tf32) or name in ("A10G", "GH200", "H100", "H200", "MI300X"), name
    assert [DEVICES["V100"].tflops[each] for each in ("fp32", "tf32", "bf16", "fp16")] == [15.7, None, None, 125]
    assert DEVICES["V100"].capacities_gib == (16, 32)


def test_a_specification_hears_of_what_it_lacks_and_of_nothing_that_it_has() -> None:
    counted = {"precision": "fp16", "parameters": 25_000_000, "activation_bytes_per_sample": 44_000_000}
    full = {"name": "net", "flops_per_sample": 24e9} | counted
    on = one("V100").model_dump() | {"network_gbps": 25}
    assert hardware.describe_guesses(spec(model=full, cluster=[on])) == []
    for name in counted:
        (said,) = hardware.describe_guesses(spec(model={key: full[key] for key in full if key != name}, cluster=[on]))
        assert [each for each in counted if f"model.{each}" in said] == [name]
    for precision, transposed, said in (("fp16", 802_816, 1), ("fp16", 0, 0), ("fp32", 802_816, 0)):
        convolutional = full | {"precision": precision, "transposed_elements_per_sample": transposed}
        sentences = hardware.describe_guesses(spec(model=convolutional, cluster=[on]))
        assert [sentence for sentence in sentences if "torch.channels_last" in sentence] == sentences
        assert len(sentences) == said


def test_changing_the_layout_of_images_costs_half_precision_the_bytes_that_pass_through_memory() -> None:
    def compute_s(**facts: Any) -> float:
        model = {"name": "new", "flops_per_sample": 24e9, "parameters": 25_000_000, "precision": "fp16"} | facts
        guess = first_guess(spec(cluster=[one("V100").model_dump()], model=model))
        return math.exp(float(guess.mean[0])) / float(guess.reference_batch_size or 0.0)

    elements = 60_000_000
    converts, none = compute_s(transposed_elements_per_sample=elements), compute_s(transposed_elements_per_sample=0)
    assert converts - none == pytest.approx(2 * 2 * elements / 900e9)
    assert none < compute_s() < converts, "an unknown layout counts as a mixture of both"
    single = {"precision": "fp32"}
    assert compute_s(**single, transposed_elements_per_sample=elements) == compute_s(**single)


def test_a_precision_makes_the_first_guess_faster_on_tensor_cores_and_narrower() -> None:
    def at(**facts: Any) -> StepTimePrior:
        model = {"name": "new", "flops_per_sample": 24e9, "parameters": 25_000_000} | facts
        return first_guess(spec(cluster=[one("V100").model_dump()], model=model))

    half, single = at(precision="fp16"), at(precision="fp32")
    assert single.mean[0] - half.mean[0] > 0.5
    assert half.sd[0] < at().sd[0]
    assert at(precision="fp16", activation_bytes_per_sample=44_000_000).sd[0] < half.sd[0]
    checkpointed = at(precision="fp16", activation_bytes_per_sample=44_000, activation_checkpointing=True)
    assert checkpointed.mean[0] > half.mean[0], "what is kept says little of what is computed"


@pytest.mark.parametrize("flops", [1e-300, 1e24])
def test_counts_beyond_reason_are_still_a_finite_guess(flops: float) -> None:
    model = {"name": "new", "flops_per_sample": flops, "parameters": 2**50, "precision": "bf16"}
    assert np.isfinite(first_guess(spec(cluster=[one("A100").model_dump()], model=model)).mean).all()
