"""Measures how accurate step times are without editing the script, and how long a first recommendation takes.

    python -m benchmarks.ease [--fresh] [--rounds 3] [--json OUT] [--smoke]

Each script of tests/e2e/scripts/unedited trains with two ranks on this machine, alternately with the start-up hook and
with the lines of docs/embed.md added to the script. Two runs of a script differ by up to a third on a shared machine.
Therefore one more line in both variants imports a clock that records when each optimizer step ends
(benchmarks/_step_clock.py), and each measured step time is divided by the time of the same step according to the clock.
Keys: `no_edit.scripts_measured` is the number of scripts, out of fourteen, for which the hook measured enough steps and
the correct batch, accumulation and world size. `no_edit.<script>.step_time_error` is the relative difference between
this ratio in runs without an edit and in runs with the agent's lines (0.03: 3 %). A run's ratio is the median over its
steps, and a variant's ratio is the median over its rounds. `no_edit.step_time_error.median` and `.max` summarise the
errors of all scripts, and `no_edit.across_runs.median` is the median error if step times of the two variants are
compared directly. `seconds_to_recommendation.digits` is the wall-clock time of `tula tune` on examples/digits_ddp.py
with the job of examples/demo.py, from the command to its recommendation; the service is already running. `--fresh`
builds a wheel and measures in a new virtual environment with this wheel, its extras `agent` and `service`, and the
scripts' frameworks. The smoke run measures only one script, and omits `seconds_to_recommendation.digits`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from packaging.requirements import Requirement

from benchmarks.support import PYTHON, clean_environment
from benchmarks.support.environment import isolated
from benchmarks.support.fork_server import AGENT, FRAMEWORKS, ForkServer
from benchmarks.support.gloo import free_port
from benchmarks.support.report import make_parser, median, print_table, write_json
from benchmarks.support.server import Server
from benchmarks.support.sink import Sink
from examples.demo import SPEC
from tula_client import Client

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "e2e" / "scripts" / "unedited"
WITH_HOOK = ROOT / "tests" / "agent" / "scripts" / "with_hook.py"
DIGITS = ROOT / "examples" / "digits_ddp.py"
BATCH, RANKS, EPOCHS = 8, 2, 12
WIDTH = {"hf_trainer": 128}
OTHER_WIDTH = 16384
ENVIRONMENT = "fresh-environment"
WARMUP_STEPS, MEASURE_STEPS = 5, 40
PATIENCE_S = 120.0
_ACCUMULATES = re.compile(r"ACCUMULATE = 2|gradient_accumulation_steps=2")


@dataclass(frozen=True)
class Measured:
    """The first rank's data after warm-up: step times in seconds, and all values of (local batch, accumulation, world
    size).

    `by_the_clock` is the median over steps of the measured time, divided by the time of the same step according to the
    independent clock.
    """

    step_time_s: list[float]
    seen: set[tuple[int, int, int]]
    by_the_clock: float

    @property
    def step_s(self) -> float:
        """Return the median step time that the agent measured."""
        return median(self.step_time_s)


def embedded(source: str) -> str:
    """Return the script with the agent's lines added: a callback, or lines for a loop with or without a loader."""
    if "pl.Trainer(" in source:
        call = "pl.Trainer(callbacks=[__import__('tula_agent.callbacks.lightning').callbacks.lightning.TulaCallback()],"
        return source.replace("pl.Trainer(", call)
    if "Trainer(model, " in source:
        module = "__import__('tula_agent.callbacks.transformers').callbacks.transformers"
        return source.replace("eval_dataset=", f"callbacks=[{module}.TulaTrainerCallback()], eval_dataset=")
    begins = "__import__('tula_agent').init(); run.watch(model, getattr(optimizer, 'optimizer', optimizer))"
    edited = re.sub(r"^( +)(for \w+ in range\(options\.epochs\))", rf"\1run = {begins}\n\1\2", source, flags=re.M)
    if "get_batch()" in source:
        edited = edited.replace(begins, f"{begins}; run.begin_loop()")
        pattern, lines = r"^( +)(loss = )", r"\1run.batch_done(); run.batch_arrived(x)\n\1\2"
    else:
        pattern, lines = r"((?: in |enumerate\(|iter\())loader\b", r"\1run.steps(loader)"
    edited, loops = re.subn(pattern, lines, edited, flags=re.M)
    if loops != 1:
        raise ValueError("the script must have exactly one loop, over `loader` or `get_batch`")
    return edited


def clocked(source: str) -> str:
    """Return the script with an import of the clock before the script's first import."""
    return re.sub(
        r"^(import|from) (?!__future__)", r"import benchmarks._step_clock  # noqa\n\1 ", source, count=1, flags=re.M
    )


class Bench:
    """Starts the ranks of scripts, and a sink to which the ranks report."""

    def __init__(self, forks: ForkServer, folder: Path) -> None:
        self._forks, self._folder = forks, folder
        self._samples = folder / "samples"
        self._samples.touch()
        self._sink = Sink(samples=self._samples)
        threading.Thread(target=self._sink.serve_forever, daemon=True).start()
        self._runs = 0

    def run(self, script: Path, *, hook: bool) -> Measured:
        """Measure the script once; kill it if it does not end within two minutes."""
        self._runs += 1
        name = f"run{self._runs}"
        spawns = script.stem.startswith("mp_spawn")  # the script itself starts its ranks, with the hook
        start = [str(WITH_HOOK), str(script)] if hook and not spawns else [str(script)]
        env = clean_environment(
            TULA_URL=self._sink.url,
            TULA_RUN_ID=name,
            TULA_KIND="profile",
            TULA_LOCAL_BATCH_SIZE=str(BATCH),  # as `tula` does, for scripts without a DataLoader
            TULA_WARMUP_STEPS=str(WARMUP_STEPS),
            TULA_MEASURE_STEPS=str(MEASURE_STEPS),
            TULA_SPOOL_DIR=str(self._folder / "spool"),
            PYTHONPATH=str(ROOT),
            STEP_CLOCK_FILE=str(self._folder / f"{name}.clock"),
        )
        width = WIDTH.get(script.stem.removesuffix("-embedded"), OTHER_WIDTH)
        options = [f"--batch-size={BATCH}", f"--epochs={EPOCHS}", f"--width={width}"]
        places = [{}] if spawns else _places()
        log = self._folder / f"{name}.log"
        started = [self._forks.start([*start, *options], env | place, log) for place in places]
        ends = time.monotonic() + PATIENCE_S
        for process in started:
            try:
                if process.wait(max(0.0, ends - time.monotonic())):
                    print(f"{script.name} failed:\n{log.read_text()[-2000:]}", file=sys.stderr)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # the process is in a separate session
        return self._measured(name, hook=hook, callback="pl.Trainer(" in script.read_text())

    def _measured(self, run_id: str, *, hook: bool, callback: bool) -> Measured:
        """Return a run's data; the first step on the clock begins when the script's first step ends.

        The agent's first step begins at the same time if the hook watches the loop, and one step earlier with the
        agent's lines or callback. With the agent's lines, a step that a scaler skips is a separate step; without them,
        it is part of the next step.
        """
        clock = json.loads((self._folder / f"{run_id}.clock").read_text())
        skipped = set(clock["skipped"]) if hook else set()
        ended = [at_s for place, at_s in enumerate(clock["ended_at_s"]) if place not in skipped]
        clock_s, first = [after - before for before, after in pairwise(ended)], 0 if hook and not callback else -1
        step_time_s, seen, ratios = [], set(), []
        for line in self._samples.read_text().splitlines():
            route, _, text = line.partition(" ")
            body = json.loads(text)
            if f"/{run_id}/" not in route or body["rank"] != 0 or body["warmup"]:
                continue
            seen.add((body["local_batch_size"], body["grad_accum_steps"], body["world_size"]))
            for step, seconds in zip(body["step"], body["step_time_s"], strict=True):
                step_time_s.append(seconds)
                if step + first < len(clock_s):
                    ratios.append(seconds / clock_s[step + first])
        return Measured(step_time_s, seen, median(ratios))

    def close(self) -> None:
        """Stop the sink."""
        self._sink.shutdown()
        self._sink.server_close()


def _places() -> list[dict[str, str]]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    size = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    return [meeting | size | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]


def without_an_edit(scripts: Sequence[Path], rounds: int, modules: Sequence[str]) -> dict[str, float]:
    """Measure every script alternately with and without the agent's lines; return the figures."""
    figures: dict[str, float] = {}
    rows, across, measured = [], [], 0
    forks = ForkServer(modules, PYTHON)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(forks, Path(name))
        try:
            for script in scripts:
                source = script.read_text()
                timed, edited = (Path(name, f"{script.stem}{suffix}.py") for suffix in ("", "-embedded"))
                timed.write_text(clocked(source))
                edited.write_text(clocked(embedded(source)))
                expected = {(BATCH, 2 if _ACCUMULATES.search(source) else 1, RANKS)}
                plain, lines = [], []
                for _ in range(rounds):
                    lines.append(bench.run(edited, hook=False))
                    plain.append(bench.run(timed, hook=True))
                whole = all(run.seen == expected and len(run.step_time_s) >= 0.8 * MEASURE_STEPS for run in plain)
                measured += whole
                ours, theirs = (median([run.by_the_clock for run in runs]) for runs in (plain, lines))
                figures[f"no_edit.{script.stem}.step_time_error"] = abs(ours / theirs - 1.0)
                times_s = [median([run.step_s for run in runs]) for runs in (plain, lines)]
                across.append(abs(times_s[0] / times_s[1] - 1.0))
                times = [f"{1e3 * value:.2f} ms" for value in times_s]
                rows.append([script.stem, *times, f"{100 * (ours / theirs - 1.0):+.1f} %", "yes" if whole else "NO"])
        finally:
            bench.close()
            forks.close()
    print_table("step time without an edit", ["script", "no edit", "embedded", "error", "measured"], rows)
    errors = list(figures.values())
    figures["no_edit.across_runs.median"] = median(across)
    figures["no_edit.scripts_measured"] = float(measured)
    figures["no_edit.step_time_error.median"] = median(errors)
    figures["no_edit.step_time_error.max"] = max(errors)
    return figures


def tuned(spec: str, script: Sequence[str], read: Callable[[Client], T]) -> tuple[float, T]:
    """Run `tula tune` on a script; return the duration in seconds and the result of `read`. Raises RuntimeError on
    failure.
    """
    with tempfile.TemporaryDirectory() as name, Server(f"sqlite:///{name}/tula.db") as server:
        start = ["--launcher", "torchrun", "--", *script]
        Path(name, "job.toml").write_text(spec)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        command = [
            sys.executable,
            "-m",
            "tula_client.cli",
            "tune",
            "job.toml",
            *start,
            "--batch-size={local_batch_size}",
        ]
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=name,
            env=clean_environment(TULA_URL=server.url, PATH=path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(f"`tula tune` failed: {done.stdout[-4000:]}")
        with Client(server.url, token="") as client:
            return took_s, read(client)


def fresh(folder: Path) -> Path:
    """Create a virtual environment with a new wheel, its dependencies and the scripts' frameworks; return its
    interpreter.
    """
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, stdout=subprocess.DEVNULL, check=True)
    needed = {
        str(requirement)
        for requirement in map(Requirement, requires("tula") or [])
        if requirement.name != "tula"
        and (
            requirement.marker is None
            or any(requirement.marker.evaluate({"extra": extra}) for extra in ("agent", "service"))
        )
    }
    (wheel,) = folder.glob("*.whl")
    bin = isolated(folder / ENVIRONMENT, needed | {"lightning", "accelerate", "transformers"}, wheel)
    program = f"#!{bin}/python\nfrom torch.distributed.run import main\nmain()\n"
    (bin / "torchrun").write_text(program)
    (bin / "torchrun").chmod(0o755)
    return bin / "python"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = make_parser("ease", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each script in each of the two variants (3)")
    parser.add_argument("--fresh", action="store_true", help="measure in a new virtual environment with a new wheel")
    options = parser.parse_args(arguments)
    if options.fresh and Path(sys.prefix).name != ENVIRONMENT:
        given = sys.argv[1:] if arguments is None else arguments
        with tempfile.TemporaryDirectory() as name:
            python = fresh(Path(name))
            return subprocess.run([str(python), "-m", "benchmarks.ease", *given], cwd=ROOT, check=False).returncode
    scripts = sorted(SCRIPTS.glob("*.py"))
    if options.smoke:
        left_out = dict.fromkeys((f"no_edit.{script.stem}.step_time_error" for script in scripts), 0.0)
        figures = left_out | without_an_edit([SCRIPTS / "plain_ddp.py"], 1, AGENT)
        figures["seconds_to_recommendation.digits"] = 0.0
    else:
        figures = without_an_edit(scripts, options.rounds, [*AGENT, *FRAMEWORKS])
        figures["seconds_to_recommendation.digits"] = took_s = tuned(SPEC.replace("MOST", "2"), [str(DIGITS)], bool)[0]
        print(f"\n`tula tune` took {took_s:.1f} s to recommend a configuration for the digits example")
    write_json(options.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
