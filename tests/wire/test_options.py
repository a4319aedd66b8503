"""Tests that a job's invalid options are refused with one sentence each, and that valid ones get a canonical form."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tula_client._spec import faults
from tula_wire import Configuration, JobSpec, RunCreate, read
from tula_wire.options import combinations, complete

OPTIONS = {"precision": ["fp32", "bf16"], "compile": ["off", "on"]}


def a_job(options: object) -> dict[str, Any]:
    cluster, dataset = {"max_nodes": 2}, {"size": 1000}
    return {"name": "job", "model": {"name": "m"}, "dataset": dataset, "cluster": cluster, "options": options}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"Precision": ["a", "b"]}, "'Precision' is not a valid option name: begin with a lowercase letter"),
        ({"num_nodes": ["1", "2"]}, "{num_nodes} is one of Tula's own placeholders: give the option 'num_nodes' an"),
        ({"p": ["fp32", "bf 16"]}, "p contains 'bf 16', which a shell may not read as one word: use only letters"),
        ({"p": ["fp32", ""]}, "p contains '', which a shell may not read as one word"),
        ({"p": ["fp32"]}, "p has fewer than two values: list today's value and at least one other"),
        ({"p": ["on", "off", "on"]}, "p contains 'on' more than once: remove the duplicate"),
        ({"workers": [4, 8]}, 'workers contains 4 without quotes: write it as a string, as in "4"'),
        ({"compile": [False, True]}, 'compile contains false without quotes: write it as a string, as in "fa'),
        ({"p": "fp32"}, 'p must be a list of values, as in ["fp32", "..."]'),
        (
            {f"o{number}": ["1", "2"] for number in range(7)},
            "these values make 128 combinations, but a job may have at most 64: remove values or options",
        ),
    ],
)
def test_options_that_no_launch_can_use_are_refused_with_one_sentence(options: object, sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(a_job(options))
    (fault,) = faults(caught.value)
    assert fault.lower().startswith(f"options: {sentence}".lower())


def test_a_job_without_options_has_one_combination_and_it_is_empty() -> None:
    spec = JobSpec.model_validate({name: value for name, value in a_job({}).items() if name != "options"})
    assert combinations(spec.options) == [()]
    assert complete(spec.options, ()) == ()


def test_the_base_is_the_first_of_all_combinations_and_each_is_canonical() -> None:
    made = combinations(OPTIONS)
    assert made[0] == (("compile", "off"), ("precision", "fp32")) == complete(OPTIONS, ())
    assert len(set(made)) == 4
    assert all(complete(OPTIONS, one) == one for one in made)


def test_an_option_that_is_left_out_has_its_first_value() -> None:
    assert complete(OPTIONS, (("precision", "bf16"),)) == (("compile", "off"), ("precision", "bf16"))


@pytest.mark.parametrize(
    ("options", "chosen", "sentence"),
    [
        (OPTIONS, (("sharding", "zero1"),), "This job has no option 'sharding': use compile, precision."),
        ({}, (("p", "x"),), "This job has no option 'p': list it under [options] in the job."),
        (OPTIONS, (("precision", "fp8"),), "Option 'precision' of this job has no value 'fp8': use fp32, bf16."),
    ],
)
def test_an_option_or_a_value_that_the_job_lacks_is_named_with_those_it_has(
    options: dict[str, list[str]], chosen: tuple[tuple[str, str], ...], sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole sentence is compared
        complete(options, chosen)
    assert str(caught.value) == sentence


def test_a_configuration_carries_its_options_as_an_object_and_keeps_them_sorted() -> None:
    sent = {"num_nodes": 2, "local_batch_size": 8, "options": {"precision": "bf16", "compile": "on"}}
    request = RunCreate.model_validate({"kind": "train", "configuration": sent})
    configuration = request.configuration
    assert configuration.options == (("compile", "on"), ("precision", "bf16"))
    assert request.model_dump(mode="json")["configuration"]["options"] == {"compile": "on", "precision": "bf16"}
    assert read(RunCreate, request.model_dump_json()) == request
    assert Configuration.from_json(configuration.as_json()) == configuration
    assert configuration != Configuration(num_nodes=2, local_batch_size=8)


@pytest.mark.parametrize("options", [{"P": "x"}, {"p": "two words"}, {f"o{n}": "x" for n in range(7)}, {"p": 1}])
def test_words_that_no_job_can_have_are_refused_in_a_configuration(options: object) -> None:
    sent = {"num_nodes": 2, "local_batch_size": 8, "options": options}
    with pytest.raises(ValidationError):
        RunCreate.model_validate({"kind": "train", "configuration": sent})
