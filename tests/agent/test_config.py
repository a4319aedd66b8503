"""The environment is read once, and nonsense in it costs a measurement but never a training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.config import is_launched, read_config

BASE = {"TULA_URL": "http://service:8321/", "TULA_RUN_ID": "r1"}
NAMES = [
    "TULA_URL", "TULA_RUN_ID", "TULA_JOB_ID", "TULA_DISABLED", "TULA_MEASURE_STEPS", "TULA_WARMUP_STEPS",
    "TULA_PRECISION", "TULA_LOCAL_BATCH_SIZE", "TULA_STACKS_AT", "RANK", "WORLD_SIZE", "SLURM_PROCID",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES), st.text(max_size=12)))
def test_no_environment_raises(environ: dict[str, str]) -> None:
    config = read_config({**BASE, **environ})
    assert config is None or config.rank >= 0


@pytest.mark.parametrize(
    "change",
    [{"TULA_URL": ""}, {"TULA_DISABLED": "1"}, {"TULA_RUN_ID": ""}, {"TULA_URL": "ftp://x"}, {"TULA_RUN_ID": "../x"}],
)
def test_without_a_place_to_report_to_there_is_no_agent(change: dict[str, str]) -> None:
    assert read_config({**BASE, **change}) is None


def test_a_profile_instruction_is_read() -> None:
    told = {"TULA_WARMUP_STEPS": "0", "TULA_MEASURE_STEPS": "30", "TULA_PRECISION": "0.02"}
    config = read_config({**BASE, **told})
    assert config is not None
    assert config.url == "http://service:8321"
    assert config.plan is not None
    assert (config.plan.warmup_steps, config.plan.measure_steps, config.plan.precision) == (0, 30, 0.02)


def test_ranks_come_from_torchrun_or_else_from_slurm() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    config = read_config({**BASE, **slurm})
    assert config is not None
    assert (config.rank, config.world_size) == (3, 8)
    config = read_config({**BASE, **slurm, "RANK": "1", "WORLD_SIZE": "2"})
    assert config is not None
    assert (config.rank, config.world_size) == (1, 2)


def test_a_step_of_one_process_is_not_taken_for_the_allocation_around_it() -> None:
    salloc = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert not is_launched(salloc)
    assert not is_launched({**salloc, "SLURM_STEP_NUM_TASKS": "1"})
    assert is_launched({**salloc, "SLURM_STEP_NUM_TASKS": "8"})
    assert is_launched({**salloc, "OMPI_COMM_WORLD_SIZE": "8"})
    assert is_launched({"RANK": "0"})
    assert is_launched({"WORLD_SIZE": "2"})


def test_a_start_in_the_place_of_another_is_known_as_such() -> None:
    starts = [{}, {"TULA_RESTART": "0"}, {"TULA_RESTART": "1"}, {"TORCHELASTIC_RESTART_COUNT": "2"}]
    configs = [read_config({**BASE, **told}) for told in starts]
    assert [config is not None and config.restarted for config in configs] == [False, False, True, True]
