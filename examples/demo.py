"""Demonstrates all of Tula on this machine, with real processes, in under five minutes on two cores (`make demo`).

The demonstration starts a service on a temporary database, profiles `digits_ddp.py` at a few configurations, and prints
the predictions for all configurations. It then measures two configurations that were not profiled, trains with the
recommended configuration, and writes the trade-off curve.
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
search = "partial"                # profile the extremes, and predict all others

[model]
name = "digits-cnn"
batch_normalization = false

[dataset]
size = 1437

[cluster]                         # each rank represents a node, with world sizes of 1, 2 and 4
min_nodes = 1
max_nodes = MOST
memory_bytes_per_rank = 2_147_483_648
price = { usd_per_node_hour = 1.00 }

[batch]                           # 16, 32, 64 and 128 examples per rank
min_local_batch_size = 16
max_local_batch_size = 128

[profiling]
profiling_warmup_steps = 10
measuring_steps = 60
"""


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="number of epochs to train at the end")
    parser.add_argument(
        "--max-nodes", type=int, default=4, help="largest number of processes; each represents a node and needs 300 MiB"
    )
    parser.add_argument("--output", type=Path, default=Path("tula-demo"), help="folder for the trade-off curve")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        with tempfile.TemporaryDirectory(prefix="tula-demo-") as folder, service(Path(folder)) as url:
            os.environ["TULA_URL"] = url
            demonstrate(Path(folder), args.output, args.epochs, args.max_nodes)
    except KeyboardInterrupt:
        say("Stopped. The service and every process of the demonstration have ended.")
        return 130
    except TulaError as error:
        say(f"The demonstration failed: {error}")
        return 1
    say(f"Done in {duration(time.monotonic() - began)}; the service has stopped, and its database has been deleted.")
    return 0


def demonstrate(folder: Path, output: Path, epochs: int, most: int) -> None:
    """Run the four steps, with the commands that a user would type."""
    spec = folder / "job.toml"
    spec.write_text(SPEC.replace("MOST", str(most)))
    work = ["--work-dir", str(folder / "work")]

    heading("Profile the configurations that the service requests, and predict all candidates")
    tula("tune", str(spec), "--launcher", "torchrun", *work, "--", *SCRIPT)

    with Client() as client:
        job = client.handle("digits")
        before = job.recommendation()

        heading("Measure two candidates that were not profiled, and compare them with the predictions")
        chosen = unprofiled(before)
        for candidate in chosen:
            measure(client, job, candidate, folder / "work")
        after = {run.configuration: run for run in reversed(job.runs()) if run.state == "succeeded"}
        compare(before, [(candidate, after[candidate.configuration]) for candidate in chosen])
        say(reconsidered(before, job.recommendation()))

        heading("Train with the recommended configuration and gradient scaling")
        options = ["--launcher", "torchrun", "--method", "gain", "--quiet", *work]
        tula("run", "digits", *options, "--", *SCRIPT, "--epochs", str(epochs))
        trained = next(run for run in job.runs() if run.kind == "train")
        logs = (folder / "work" / job.id / "logs").glob(f"{trained.id}*.log")  # one log for each start of the run
        epoch_lines = [x for log in sorted(logs) for x in log.read_text().splitlines() if x.startswith("epoch")]
        say("\n".join([*epoch_lines[4:-1:5], *epoch_lines[-1:]]))
        if trained.step_time_s is not None:
            say(f"Measured over the training run: {duration(trained.step_time_s)} per step.")

        heading("Plot the trade-off curve")
        output.mkdir(parents=True, exist_ok=True)
        tula("plot", "digits", "--output", str(output / "tradeoff.png"))


def unprofiled(recommendation: Recommendation) -> list[Candidate]:
    """Return the allowed candidates with the smallest and the largest global batch among those not profiled."""
    open_ = [
        candidate
        for candidate in recommendation.candidates
        if not candidate.profiled and candidate.excluded_by is None and not candidate.spot
    ]
    ordered = sorted(open_, key=lambda candidate: (candidate.global_batch_size, candidate.configuration.num_nodes))
    return [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered


def measure(client: Client, job: JobHandle, candidate: Candidate, root: Path) -> None:
    """Profile one configuration that the search did not choose. Raises `TulaError` if the command fails."""
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
    """Print the predicted and measured step times, the errors, and whether the intervals contain the measured times."""
    rows = []
    for candidate, run in pairs:
        predicted, measured = candidate.step_time_s, run.step_time_s
        if measured is None:
            raise TulaError(f"run {run.id} reported no step time")
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
    headings = ["configuration", ">predicted step", ">measured", ">error", "within the interval"]
    CONSOLE.print(table(headings, rows))
    say(f"The model used {before.model.num_runs} runs. The ranks share this machine's cores, so step times are noisy.")


def reconsidered(before: Recommendation, now: Recommendation) -> str:
    """Return a sentence that says whether the two additional measurements changed the recommendation."""
    was, is_now = (None if answer.chosen is None else answer.chosen.configuration for answer in (before, now))
    if was == is_now:
        return "These two measurements do not change the recommendation."
    return f"These two measurements change the recommendation. {now.why}"


@contextlib.contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run a service on a temporary database and a free port, in a new session, which Ctrl-C does not reach."""
    log = (folder / "service.log").open("w+")
    port = free_port()
    command = [sys.executable, "-m", "tula_client.cli", "serve", "--database", str(folder / "tula.db"), "--port", port]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, folder / "service.log")
        say(f"The service listens on {url}, and its database is {folder / 'tula.db'}.")
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
    """Return the number of a free port."""
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the service is ready. Raises `TulaError` with the end of the log if this takes over a minute."""
    with Client(url) as client:
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(TulaError):
                client.ready()
                return
    raise TulaError("the service did not start: " + " ".join(log.read_text().splitlines()[-3:]))


def tula(*arguments: str) -> None:
    """Print and run a `tula` command; on Ctrl-C, interrupt the command and wait for its clean-up.

    The command runs in a new session; otherwise, it would be interrupted twice, by the terminal and by this program.
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
