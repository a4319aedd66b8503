"""`make demo`: all of Tula once, on this machine, with real processes; under five minutes on two cores.

Serves on a temporary database, profiles `digits_ddp.py` at a few configurations, prints the predictions for all,
measures two that were not profiled, trains with the recommended one, and writes the trade-off curve.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from tula_client import Client, JobHandle, TulaError
from tula_client.cli.output import estimate, table
from tula_client.launch.reporter import Reporter
from tula_client.launch.run_loop import Runner
from tula_client.launch.template import Template, with_launcher
from tula_client.launch.workdir import WorkDir
from tula_wire import Candidate, Recommendation, Run, RunCreate
from tula_wire.format import configuration, duration, percent

EXAMPLES = Path(__file__).resolve().parent
SCRIPT = [str(EXAMPLES / "digits_ddp.py"), "--batch-size", "{local_batch_size}"]
SPEC = """\
name = "digits"
epochs = 20
objective = "balanced"
search = "partial"                # profile the extremes, predict the rest

[model]
name = "digits-cnn"
batch_normalization = false

[dataset]
size = 1437

[cluster]                         # one rank stands for one node: world sizes 1, 2 and 4
min_nodes = 1
max_nodes = MOST
memory_bytes_per_rank = 2_147_483_648
price = { usd_per_node_hour = 1.00 }

[batch]                           # 16, 32, 64 and 128 a rank
min_local_batch_size = 16
max_local_batch_size = 128

[profiling]
profiling_warmup_steps = 10
measuring_steps = 60
"""


def main() -> int:
    """Run the demonstration; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="epochs to train at the end")
    parser.add_argument(
        "--max-nodes", type=int, default=4, help="number of processes at most; each stands for a node and takes 300 MiB"
    )
    parser.add_argument("--output", type=Path, default=Path("tula-demo"), help="folder for the curve")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        with tempfile.TemporaryDirectory(prefix="tula-demo-") as folder, service(Path(folder)) as url:
            os.environ["TULA_URL"] = url
            demonstrate(Path(folder), args.output, args.epochs, args.max_nodes)
    except KeyboardInterrupt:
        say("Stopped; the service and every process of the demonstration have ended.")
        return 130
    except TulaError as error:
        say(f"The demonstration failed: {error}")
        return 1
    say(f"Done in {duration(time.monotonic() - began)}; the service is shut down and its database deleted.")
    return 0


def demonstrate(folder: Path, output: Path, epochs: int, most: int) -> None:
    """The four steps, with the commands that a user types."""
    spec = folder / "job.toml"
    spec.write_text(SPEC.replace("MOST", str(most)))
    work = ["--work-dir", str(folder / "work")]

    heading("Profile the configurations that the service asks for, predict every candidate")
    tula("tune", str(spec), "--launcher", "torchrun", *work, "--", *SCRIPT)

    with Client() as client:
        job = client.handle("digits")
        before = job.recommendation()

        heading("Two candidates that were not profiled: predicted, then measured")
        chosen = unprofiled(before)
        for candidate in chosen:
            measure(client, job, candidate, folder / "work")
        after = {run.configuration: run for run in reversed(job.runs()) if run.state == "succeeded"}
        compare(before, [(candidate, after[candidate.configuration]) for candidate in chosen])
        say(reconsidered(before, job.recommendation()))

        heading("Train with the recommendation and gradient scaling")
        options = ["--launcher", "torchrun", "--method", "gain", "--quiet", *work]
        tula("run", "digits", *options, "--", *SCRIPT, "--epochs", str(epochs))
        trained = next(run for run in job.runs() if run.kind == "train")
        logs = (folder / "work" / job.id / "logs").glob(f"{trained.id}*.log")  # one for each start of the run
        epoch_lines = [x for log in sorted(logs) for x in log.read_text().splitlines() if x.startswith("epoch")]
        say("\n".join([*epoch_lines[4:-1:5], *epoch_lines[-1:]]))
        if trained.step_time_s is not None:
            say(f"Measured over the training: {duration(trained.step_time_s)} a step.")

        heading("The trade-off curve")
        output.mkdir(parents=True, exist_ok=True)
        tula("plot", "digits", "--output", str(output / "tradeoff.png"))


def unprofiled(recommendation: Recommendation) -> list[Candidate]:
    """Two allowed candidates that were not profiled, the smallest and the largest global batch."""
    open_ = [
        candidate
        for candidate in recommendation.candidates
        if not candidate.profiled and candidate.excluded_by is None and not candidate.spot
    ]
    ordered = sorted(open_, key=lambda candidate: (candidate.global_batch_size, candidate.configuration.num_nodes))
    return [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered


def measure(client: Client, job: JobHandle, candidate: Candidate, root: Path) -> None:
    """Profile one configuration that the search did not choose; raises `TulaError` when its command fails."""
    words, _ = with_launcher("torchrun", SCRIPT)
    work = WorkDir(root, job.id)
    with work.locked() as holder, Runner(client, work, holder, Reporter(Console(quiet=True))) as runner:
        request = RunCreate(kind="profile", configuration=candidate.configuration, holder=holder)
        active = runner.start(client.create_run(job.id, request), Template(tuple(words)))
        while (status := runner.poll(active)) is None:
            time.sleep(0.1)
        ((_, outcome),) = runner.finish(active, status)
    if outcome.state != "succeeded":
        raise TulaError(f"{configuration(candidate.configuration)}: {outcome.message}")


def compare(before: Recommendation, pairs: Sequence[tuple[Candidate, Run]]) -> None:
    """Print predicted and measured step time, the error, and whether the interval contains the measured one."""
    rows = []
    for candidate, run in pairs:
        predicted, measured = candidate.step_time_s, run.step_time_s
        if measured is None:
            raise TulaError(f"run {run.id} has no step time")
        error = (predicted.value - measured) / measured
        rows.append(
            [
                configuration(candidate.configuration),
                estimate(predicted),
                duration(measured),
                percent(error, signed=True),
                "yes" if predicted.low <= measured <= predicted.high else "no",
            ]
        )
    headings = ["configuration", ">predicted step", ">measured", ">error", "in the interval"]
    CONSOLE.print(table(headings, rows))
    say(f"Predicted from {before.model.num_runs} profiled runs. Ranks share this machine's cores, so steps are noisy.")


def reconsidered(before: Recommendation, now: Recommendation) -> str:
    """Whether two more measurements changed the recommendation, which the training follows."""
    was, is_now = (None if answer.chosen is None else answer.chosen.configuration for answer in (before, now))
    if was == is_now:
        return "With these two measured as well, the recommendation stays."
    return f"With these two measured as well, the recommendation changes. {now.why}"


@contextlib.contextmanager
def service(folder: Path) -> Iterator[str]:
    """A service on a temporary database and a free port, in a new session so that Ctrl-C does not reach it first."""
    log = (folder / "service.log").open("w+")
    port = free_port()
    command = [sys.executable, "-m", "tula_client.cli", "serve", "--database", str(folder / "tula.db"), "--port", port]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, folder / "service.log")
        say(f"The service listens on {url}, its database is {folder / 'tula.db'}.")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def free_port() -> str:
    """A port that nothing listens on."""
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the service answers; raises `TulaError` with the end of its log when it does not within a minute."""
    with Client(url) as client:
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(TulaError):
                client.ready()
                return
    raise TulaError("the service did not start: " + " ".join(log.read_text().splitlines()[-3:]))


def tula(*arguments: str) -> None:
    """Print and run a `tula` command; on Ctrl-C, interrupt it and wait for its clean-up.

    It runs in a new session, or it would get the terminal's signal as well as ours.
    """
    say("$ tula " + " ".join(json.dumps(word) if " " in word else word for word in arguments))
    process = subprocess.Popen([sys.executable, "-m", "tula_client.cli", *arguments], start_new_session=True)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if code:
        raise TulaError(f"tula {arguments[0]} ended with exit code {code}")


def heading(text: str) -> None:
    """Print the title of a step."""
    CONSOLE.print(f"\n[bold]== {text}[/bold]")


def say(text: str) -> None:
    """Print a line."""
    CONSOLE.print(text, soft_wrap=True, markup=False)


CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 160)

if __name__ == "__main__":
    sys.exit(main())
