"""`tula probe` as a person meets it: a launcher is started, its result is stored and printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.client.test_cli import Tula, answer, tula
from tula_client import Client
from tula_wire import FabricProbe
from tula_wire.samples import PROBE_MARK

__all__ = ["tula"]

READINGS = [{"size_bytes": size, "time_s": 1e-4 + 1e-9 * size, "repeats": 9} for size in (2**10, 2**18, 2**26)]
PROBE = FabricProbe.model_validate(
    {"backend": "gloo", "num_nodes": 2, "ranks_per_node": 2, "all_ranks": READINGS, "in_node": READINGS}
)
SPEC = """
name = "two clusters"
model = { name = "net" }
dataset = { size = 1000 }
cluster = [{ instance_type = "a", max_nodes = 2 }, { instance_type = "b", max_nodes = 2, network_gbps = 25 }]
batch = { max_local_batch_size = 64 }
"""


def launcher(printed: str, status: int = 0) -> list[str]:
    """A command that ignores what follows it, as `python -c` does, and prints what its first rank would."""
    return [sys.executable, "-c", f"print({printed!r}); raise SystemExit({status})"]


def test_the_first_ranks_result_is_stored_for_the_jobs_cluster(tula: Tula, address: str, tmp_path: Path) -> None:
    spec = tmp_path / "job.toml"
    spec.write_text(SPEC)
    # torchrun --tee, srun --label and Ray put a prefix before each line.
    rank = launcher(f"0: starting\n0: {PROBE_MARK}{PROBE.model_dump_json()}\n0: done")
    printed = answer(tula("probe", "--spec", str(spec), "--instance-type", "b", "--json", "--", *rank))
    assert printed["probe"] == PROBE.model_copy(update={"instance_type": "b", "network_gbps": 25.0}).model_dump()
    assert printed["all_ranks"]["seconds_per_byte"]["value"] == pytest.approx(1e-9, rel=0.01)
    with Client(address, token="") as client:
        assert client.fabrics().fabrics[0].model_dump(mode="json") == printed
    code, text, _ = tula("probe", "--", *rank)
    assert code == 0
    assert "1 KiB" in text
    assert "one node" in text
    assert "Stored for default nodes (gloo)." in text


def test_a_cluster_that_the_specification_leaves_open_is_asked_for(tula: Tula, tmp_path: Path) -> None:
    spec = tmp_path / "job.toml"
    spec.write_text(SPEC)
    code, _, error = tula("probe", "--spec", str(spec), "--", *launcher(""))
    assert code == 2
    assert "--instance-type" in error
    assert "a, b" in error


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (launcher("no such rank", 3), "failed with status 3"),
        (launcher("nothing"), "ended without a result"),
        (launcher(PROBE_MARK + "{}"), "cannot be used"),
    ],
)
def test_a_launcher_that_measures_nothing_is_explained(tula: Tula, command: list[str], said: str) -> None:
    code, _, error = tula("probe", "--", *command)
    assert code == 1
    assert said in error
