"""Tests that `tula tune` passes options to a real script and recommends only a combination that it has launched."""

from __future__ import annotations

from pathlib import Path

from benchmarks.support.forked import Server
from tests.e2e.command import Tula

SCRIPT = str(Path(__file__).parents[2] / "examples" / "switches_ddp.py")
OPTIONS = {"precision": ["fp32", "bf16"], "num_workers": ["0", "1"]}
COMMAND = [
    "--", "torchrun", "--standalone", "--nproc-per-node={world_size}", SCRIPT, "--width=32", "--depth=2",
    "--epochs=50", "--batch-size={local_batch_size}",
]  # fmt: skip


def spec(tula: Tula, name: str, *, launches: int, **options: list[str]) -> str:
    """Write a job with one rank and these options; return its path."""
    path = Path(tula.spec(name, nodes=1, least_batch=16, batch=32, search="adaptive"))
    values = "\n".join(f"{option} = {values}" for option, values in options.items())
    path.write_text(f"{path.read_text()}max_runs = {launches}\n[options]\n{values}\n".replace("'", '"'))
    return str(path)


def test_tune_launches_options_and_recommends_a_combination_that_was_launched(server: Server, tmp_path: Path) -> None:
    tula = Tula(server, tmp_path, forked=True)
    words = [*COMMAND, "--precision={precision}", "--workers={num_workers}"]
    tuned, _ = tula("tune", spec(tula, "switches", launches=3, **OPTIONS), *words)
    runs = tula.runs("switches")
    assert {run.state for run in runs} == {"succeeded"}, tula.logs()
    with tula.client() as client:
        machines = [(dict(run.configuration.options), client.run(run.id).machine) for run in runs]
    for options, machine in machines:
        assert machine is not None
        assert machine.precision == {"fp32": "float32", "bf16": "bfloat16"}[options["precision"]]
        assert (machine.compiled, machine.checkpointing, machine.sharded) == (False, False, False)
        assert machine.loader_workers == int(options["num_workers"])
    launched = {run.configuration.options for run in runs}
    base = tuple(sorted((name, values[0]) for name, values in OPTIONS.items()))
    assert base in launched
    assert len(launched) > 1
    answer = tuned["recommendation"]
    assert tuple(sorted(answer["chosen"]["configuration"]["options"].items())) in launched
    assert answer["with_base_options"]["configuration"]["options"] == dict(base)
    assert {(one["option"], one["value"]) for one in answer["options"]} == {("precision", "bf16"), ("num_workers", "1")}
    assert "in this run, but" not in tula.logs()  # each launch ran with its options
