"""Checks what `tula tune` chooses for four options of a real script against measurements of all combinations.

    python -m benchmarks._switches [--options compile,checkpointing,precision,num_workers] [--ranks 2] [--json OUT]

`tula tune` chooses the number of nodes (ranks on this machine), the batch and the values of the options for
`examples/switches_ddp.py`, whose ranks run on the CPU and use gloo. A second job then measures every candidate.
`switches.regret` is the fraction by which training takes longer with the choice than with the best candidate, according
to the second job. `switches.launches` and `switches.exhaustive` are the numbers of launches of the two jobs. The exit
status is 1 if the regret is above 5 % or the first job needed more than half as many launches as the second. The
benchmark needs idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.support import clean_environment, tune_words
from benchmarks.support.forked import Server
from tula_client import Client
from tula_wire import Configuration, Run
from tula_wire.format import configuration, duration, percent

ROOT: Final = Path(__file__).parents[1]
OPTIONS: Final = {
    "precision": ("--precision", ["fp32", "bf16"]),
    "compile": ("--compile", ["off", "on"]),
    "checkpointing": ("--checkpointing", ["off", "on"]),
    "num_workers": ("--workers", ["0", "1"]),
}
"""The flag of each option in the script, and its values."""
SIZE: Final = 2048
JOB: Final = """
name = "switches-{search}"
search = "{search}"
objective = "time"
epochs = 1000
model = {{ name = "residual" }}
dataset = {{ size = {size} }}
cluster = {{ max_nodes = {ranks} }}
batch = {{ min_local_batch_size = 32, max_local_batch_size = 128 }}
[profiling]
profiling_warmup_steps = 5
measuring_steps = 30
[options]
{options}
"""
MOST_REGRET: Final = 0.05
MOST_SHARE: Final = 0.5


def main() -> int:
    """Tune, measure all candidates, and print the figures; return 1 if regret or launches exceed their limits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._switches")
    parser.add_argument("--options", default=",".join(OPTIONS), help="names of the options to vary")
    parser.add_argument("--ranks", type=int, default=2, help="largest number of ranks on this machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    chosen_options = {name: OPTIONS[name] for name in arguments.options.split(",")}
    with tempfile.TemporaryDirectory() as folder, Server(str(Path(folder) / "tula.db")) as server:
        tuned = tune(server, Path(folder), "adaptive", chosen_options, arguments.ranks)
        tune(server, Path(folder), "full", chosen_options, arguments.ranks)
        with Client(server.url, token="") as client:
            runs = {name: client.handle(f"switches-{name}").runs() for name in ("adaptive", "full")}
    took = {run.configuration: hours(run) for run in runs["full"] if run.step_time_s is not None}
    choice = Configuration.from_json(tuned["recommendation"]["chosen"]["configuration"])
    best = min(took, key=took.__getitem__)
    figures = {
        "switches.regret": took[choice] / took[best] - 1.0,
        "switches.launches": launches(runs["adaptive"]),
        "switches.exhaustive": launches(runs["full"]),
    }
    for name, shown in (("chosen", choice), ("best of all", best)):
        print(f"{name:<12} {configuration(shown)}: {duration(3600 * took[shown])}")
    share = figures["switches.launches"] / figures["switches.exhaustive"]
    print(
        f"training takes {percent(figures['switches.regret'])} longer with the choice than with the best candidate; "
        f"tuning needed {percent(share)} of the launches required to measure all candidates"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(figures["switches.regret"] > MOST_REGRET or share > MOST_SHARE)


def tune(server: Server, folder: Path, search: str, options: dict[str, tuple[str, list[str]]], ranks: int) -> Any:
    """Return the output of `tula tune --json` for a job with the given search."""
    spec = folder / f"{search}.toml"
    values = "\n".join(f"{name} = {json.dumps(words)}" for name, (_, words) in options.items())
    spec.write_text(JOB.format(search=search, size=SIZE, ranks=ranks, options=values))
    flags = [word for name, (flag, _) in options.items() for word in (flag, f"{{{name}}}")]
    script = [str(ROOT / "examples" / "switches_ddp.py"), "--epochs", "10000", "--width", "256", "--depth", "4"]
    command = [
        *tune_words(spec, folder / search),
        "--launcher",
        "torchrun",
        "--",
        *script,
        "--batch-size",
        "{local_batch_size}",
        *flags,
    ]
    path = f"{Path(sys.executable).parent}:{clean_environment()['PATH']}"
    done = subprocess.run(
        command, env=clean_environment(TULA_URL=server.url, PATH=path), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"tula tune ended with {done.returncode}")
    return json.loads(done.stdout)


def hours(run: Run) -> float:
    """Return how many hours the whole training takes at the step time that a run measured."""
    assert run.step_time_s is not None
    return 1000 * SIZE / run.configuration.global_batch_size * run.step_time_s / 3600


def launches(runs: list[Run]) -> int:
    """Return the number of launches; runs that differ only in the batch share a launch."""
    return len({(run.configuration.num_nodes, run.configuration.options) for run in runs})


if __name__ == "__main__":
    sys.exit(main())
