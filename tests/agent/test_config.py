"""Tests that the environment is read once, and that an invalid value may prevent a measurement but never training."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.config import ProfilePlan, is_launched, read_config

BASE = {"TULA_URL": "http://service:8321/", "TULA_RUN_ID": "r1"}
NAMES = [
    "TULA_URL", "TULA_RUN_ID", "TULA_JOB_ID", "TULA_DISABLED", "TULA_KIND", "TULA_MEASURE_STEPS", "TULA_WARMUP_STEPS",
    "TULA_PRECISION", "TULA_PROBE_S", "TULA_LOCAL_BATCH_SIZE", "TULA_OPTIONS", "RANK", "WORLD_SIZE", "SLURM_PROCID",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=12)))
def test_no_environment_raises(environ: dict[str, str]) -> None:
    config = read_config({**BASE, **environ})
    assert config is None or config.rank >= 0


@pytest.mark.parametrize(
    "change",
    [
        {"TULA_URL": ""},
        {"TULA_DISABLED": "1"},
        {"TULA_RUN_ID": ""},
        {"TULA_URL": "ftp://x"},
        {"TULA_RUN_ID": "../x"},
        {"TULA_RUN_ID": ".."},
    ],
)
def test_without_a_valid_url_and_run_there_is_no_agent(change: dict[str, str]) -> None:
    assert read_config({**BASE, **change}) is None


def test_a_profiling_plan_is_read_from_the_environment() -> None:
    variables = {"TULA_WARMUP_STEPS": "0", "TULA_MEASURE_STEPS": "30", "TULA_PRECISION": "0.02", "TULA_PROBE_S": "1"}
    config = read_config({**BASE, **variables})
    assert config is not None
    assert config.url == "http://service:8321"
    assert config.plan is not None
    assert config.plan == ProfilePlan(0, 30, 0.02, probe_s=1.0)


def test_options_of_a_run_are_read_from_the_environment_as_the_launcher_writes_them() -> None:
    for text, options in (
        ("compile=on,precision=bf16", (("compile", "on"), ("precision", "bf16"))),
        ("", ()),
        ("compile", ()),
    ):
        config = read_config({**BASE, "TULA_OPTIONS": text})
        assert config is not None
        assert config.options == options


def test_the_kind_of_the_run_goes_before_the_number_of_steps() -> None:
    def plan(**variables: str) -> ProfilePlan | None:
        config = read_config({**BASE, **variables})
        assert config is not None
        return config.plan

    assert plan(TULA_KIND="profile") == ProfilePlan(5, 30)
    assert plan(TULA_KIND="train", TULA_MEASURE_STEPS="30") is None
    assert plan(TULA_KIND="neither", TULA_MEASURE_STEPS="20") == ProfilePlan(5, 20)


def test_ranks_come_from_torchrun_or_else_from_slurm() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    config = read_config({**BASE, **slurm})
    assert config is not None
    assert (config.rank, config.world_size) == (3, 8)
    config = read_config({**BASE, **slurm, "RANK": "1", "WORLD_SIZE": "2"})
    assert config is not None
    assert (config.rank, config.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "TULA_RANKS_PER_NODE": "4"}, 2),
        ({"SLURM_NTASKS": "8", "TULA_RANKS_PER_NODE": "4"}, 4),
        ({"TULA_RANKS_PER_NODE": "4"}, 1),
    ],
)
def test_ranks_of_a_node_come_from_torchrun_or_else_from_the_plan(environ: dict[str, str], ranks: int) -> None:
    config = read_config({**BASE, **environ})
    assert config is not None
    assert config.ranks_per_node == ranks


def test_one_process_in_a_slurm_allocation_was_not_launched_as_a_rank() -> None:
    salloc = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert not is_launched(salloc)
    assert not is_launched({**salloc, "SLURM_STEP_NUM_TASKS": "1"})
    assert is_launched({**salloc, "SLURM_STEP_NUM_TASKS": "8"})
    assert is_launched({**salloc, "OMPI_COMM_WORLD_SIZE": "8"})
    assert is_launched({"RANK": "0"})
    assert is_launched({"WORLD_SIZE": "2"})


def test_a_restart_by_tula_or_torchrun_is_recognised() -> None:
    starts = [{}, {"TULA_RESTART": "0"}, {"TULA_RESTART": "1"}, {"TORCHELASTIC_RESTART_COUNT": "2"}]
    configs = [read_config({**BASE, **variables}) for variables in starts]
    assert [config is not None and config.restarted for config in configs] == [False, False, True, True]


def test_only_the_process_that_measures_a_run_reads_its_configuration_again() -> None:
    mine, of_another = f"{os.getpid()}:r1", "1:r1"
    assert read_config({**BASE, "TULA_MEASURED_BY": mine}) is not None
    assert read_config({**BASE, "TULA_MEASURED_BY": of_another}) is None
    assert read_config({**BASE, "TULA_RUN_ID": "r2", "TULA_MEASURED_BY": of_another}) is not None
