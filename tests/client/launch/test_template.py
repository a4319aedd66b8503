"""Tests what the command template fills in, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tula_client._errors import UsageError
from tula_client.launch.template import Template
from tula_wire import Configuration, JobSpec

CONFIGURATION = Configuration(num_nodes=2, ranks_per_node=4, local_batch_size=32, grad_accum_steps=3)


def spec(**changes):
    base = {
        "name": "j",
        "model": {"name": "m"},
        "dataset": {"size": 1000},
        "cluster": {"max_nodes": 4},
        "batch": {"min_local_batch_size": 8, "max_local_batch_size": 64},
    }
    return JobSpec.model_validate({**base, **changes})


def test_every_placeholder_is_filled_in_anywhere_in_a_word():
    template = Template(
        (
            "torchrun",
            "--nnodes={num_nodes}",
            "--nproc-per-node={ranks_per_node}",
            "x.py",
            "-n{world_size}",
            "{local_batch_size}x{grad_accum_steps}={global_batch_size}",
            "{instance_type}",
        )
    )
    assert template.fill(CONFIGURATION) == [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=4",
        "x.py",
        "-n8",
        "32x3=768",
        "default",
    ]


def test_an_argument_with_resume_appears_only_on_a_restart():
    template = Template(("python", "x.py", "{local_batch_size}", "--resume={resume}"))
    assert template.fill(CONFIGURATION) == ["python", "x.py", "32"]
    assert template.fill(CONFIGURATION, resume="/c") == ["python", "x.py", "32", "--resume=/c"]


def test_doubled_braces_are_literal_and_foreign_braces_stay():
    template = Template(("bash", "-c", "echo ${{HOME}} {} {1..3} {{world_size}} '{\"a\": 1}'"))
    assert template.fill(CONFIGURATION)[2] == "echo ${HOME} {} {1..3} {world_size} '{\"a\": 1}'"
    assert template.placeholders == frozenset()


@given(st.text(alphabet=st.characters(blacklist_characters="{}\x00", blacklist_categories=("Cs",)), min_size=1))
def test_text_without_braces_is_passed_on_unchanged(text):
    assert Template(("echo", text)).fill(CONFIGURATION) == ["echo", text]


def test_an_unknown_placeholder_is_refused_by_name():
    with pytest.raises(UsageError, match=r"unknown placeholder \{batch\}.*\{local_batch_size\}"):
        Template(("python", "x.py", "{batch}"))


def test_an_empty_command_is_refused():
    with pytest.raises(UsageError, match="the command is missing"):
        Template(())


@pytest.mark.parametrize(
    ("command", "changes", "missing"),
    [
        (("x", "{local_batch_size}"), {}, r"no \{num_nodes\} or \{world_size\}, but the job tries 1 to 4 nodes"),
        (("x", "{world_size}"), {}, r"no \{local_batch_size\} or \{global_batch_size\}"),
        (
            ("x", "{world_size}", "{local_batch_size}"),
            {"batch": {"max_grad_accum_steps": 4}},
            r"no \{grad_accum_steps\} or .*up to 4 accumulation steps",
        ),
        (
            ("x", "{world_size}", "{local_batch_size}"),
            {"cluster": [{"instance_type": "a", "max_nodes": 2}, {"instance_type": "b", "max_nodes": 2}]},
            r"no \{instance_type\}, but the job offers 2",
        ),
    ],
)
def test_a_quantity_that_the_job_varies_needs_its_placeholder(command, changes, missing):
    with pytest.raises(UsageError, match=missing):
        Template(command).check(spec(**changes))


OPTIONS = {"precision": ["fp32", "bf16"], "num_workers": ["4", "8"]}


def test_options_of_the_job_are_placeholders_filled_from_the_configuration():
    words = ("x", "{world_size}", "{local_batch_size}", "--precision={precision}", "--num-workers", "{num_workers}")
    template = Template(words, frozenset(OPTIONS))
    template.check(spec(options=OPTIONS))
    chosen = replace(CONFIGURATION, options=(("num_workers", "8"), ("precision", "bf16")))
    assert template.fill(chosen)[3:] == ["--precision=bf16", "--num-workers", "8"]


def test_an_option_of_the_job_needs_its_placeholder():
    template = Template(("x", "{world_size}", "{local_batch_size}", "{precision}"), frozenset(OPTIONS))
    with pytest.raises(UsageError) as caught:
        template.check(spec(options=OPTIONS))
    assert str(caught.value) == (
        "the command has no {num_workers}, but the job tries 4 and 8 for this option: add the placeholder "
        "where the script expects the value, as in --num-workers {num_workers}"
    )


def test_a_placeholder_that_is_no_option_of_the_job_is_refused_with_the_options_that_it_has():
    with pytest.raises(UsageError, match=r"unknown placeholder \{compile\}.*\{num_workers\}.*under \[options\]"):
        Template(("x", "{compile}"), frozenset(OPTIONS))


def test_a_quantity_that_the_job_fixes_needs_no_placeholder():
    fixed = spec(cluster={"min_nodes": 2, "max_nodes": 2}, batch={"min_local_batch_size": 8, "max_local_batch_size": 8})
    Template(("x.sh",)).check(fixed)
    Template(("x", "{world_size}", "{local_batch_size}", "{global_batch_size}")).check(
        spec(batch={"max_grad_accum_steps": 4})
    )


def test_a_command_gets_its_folder_of_checkpoints_and_the_factor_of_its_learning_rate():
    template = Template(("python", "x.py", "--output-dir={checkpoint_dir}", "--lr-times", "{learning_rate_factor}"))
    filled = template.fill(CONFIGURATION, checkpoint_dir="/c", learning_rate_factor=2**0.5)
    assert filled == ["python", "x.py", "--output-dir=/c", "--lr-times", "1.41421"]
    assert template.fill(CONFIGURATION)[-1] == "1"


@pytest.mark.parametrize(
    ("examples", "local", "steps"),
    [(288_000_000.0, 64, 4_500_000), (64.0, 64, 1), (65.0, 64, 2), (1.0, 64, 1), (100 * 1.1, 110, 1)],
)
def test_a_script_that_counts_steps_gets_as_many_as_take_every_example_of_the_job(examples, local, steps):
    """Rounding may make the product of data set size and epochs slightly larger than a multiple of the batch."""
    batch = replace(CONFIGURATION, num_nodes=1, ranks_per_node=1, local_batch_size=local, grad_accum_steps=1)
    assert Template(("x", "--max-steps={max_steps}")).fill(batch, examples=examples)[-1] == f"--max-steps={steps}"


@pytest.mark.parametrize("hostile", ["p3$(touch X)", "a b", "a;b", "`x`", "'", '"', "a\n", "é", "a[/b]c", "x" * 201])
def test_a_name_that_a_shell_could_read_as_more_than_a_word_is_refused(hostile):
    """This also holds within double quotes, or for a shell within a shell, where quoting by Tula could not help."""
    template = Template(("bash", "-c", 'echo "{instance_type} {run_id}"'))
    with pytest.raises(UsageError, match="instance_type"):
        template.fill(replace(CONFIGURATION, instance_type=hostile))
    with pytest.raises(UsageError, match="run_id"):
        template.fill(CONFIGURATION, run_id=hostile)
    with pytest.raises(ValidationError):
        spec(cluster={"instance_type": hostile, "max_nodes": 4})
    assert template.fill(replace(CONFIGURATION, instance_type="p4d.24xlarge/us-east-1@spot"))
