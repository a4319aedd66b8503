"""Creates the pictures of the documents: `make pictures` starts a service, tunes and trains the digits example, films
the tuning, takes screenshots of the pages, and draws the workflow with the numbers of the run.

    python -m docs.pictures [--epochs 20] [--output docs/pictures]

This takes about two minutes, and needs Chromium (tests/system-packages.sh).
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import html
import io
import os
import pty
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from ptyreel import TapeSettings, render_svg
from ptyreel.layout import Layout
from ptyreel.screen import TerminalScreen

from benchmarks.support.chromium import FLAGS, chromium_path
from examples import demo
from tula_client import Client, JobHandle, TulaError
from tula_wire import LedgerEntry, Recommendation
from tula_wire.format import duration, percent

WIDTH, HEIGHT, COLOURS = 1280, 860, 256
PICTURES = ("tune.svg", "workflow.svg", "job.png", "frontier.png", "run.png")
"""`tula tune` on a terminal, the workflow with the numbers of a run, a job's recommendation, the job's chart of time
against cost, and a training run's page."""
Piece = tuple[float, str]
"""Time in seconds at which a command wrote to its terminal, and what it wrote."""
TUNE = "tune job.toml --launcher torchrun -- examples/digits_ddp.py --batch-size {local_batch_size}"
SCREEN = TapeSettings(width=940, height=720, font_size=12, padding=14, loop_delay_ms=8_000)
FILM_MS, TYPING_MS, FRAME_MS = 20_000, 2_000, 400
"""Length in milliseconds of the film, of typing the command, and of a frame."""
BOX, GAP, LINE = 220, 27, 22
"""Width of a step of the workflow, space between two steps, and distance between two lines, in pixels."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Create all pictures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="number of training epochs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "pictures", help="output folder")
    options = parser.parse_args(arguments)
    if (chromium := chromium_path()) is None:
        parser.error("Chromium was not found: install the packages listed in tests/system-packages.sh")
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory(prefix="tula-pictures-") as folder, demo.service(Path(folder)) as url:
        os.environ["TULA_URL"] = url
        (options.output / "tune.svg").write_text(film(tuned_on_a_terminal(Path(folder))), encoding="utf-8")
        with tempfile.TemporaryDirectory() as output:
            demo.demonstrate(Path(folder), Path(output), options.epochs, most=4)
        with Client() as client, sync_playwright() as playwright, contextlib.ExitStack() as stack:
            job = client.handle("digits")
            trained = next(run for run in job.runs() if run.kind == "train")
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            stack.callback(browser.close)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.goto(f"{url}/jobs/{job.id}")
            page.wait_for_load_state("networkidle")
            frontier = page.locator("figure").first
            keep(page.locator("section.answer").screenshot(), options.output / "job.png")
            keep(frontier.screenshot(), options.output / "frontier.png")
            page.goto(f"{url}/runs/{trained.id}")
            page.wait_for_load_state("networkidle")
            keep(page.screenshot(), options.output / "run.png")
            (options.output / "workflow.svg").write_text(workflow(measured_steps(job)), encoding="utf-8")
    return 0


def tuned_on_a_terminal(folder: Path) -> list[Piece]:
    """Run `tula tune` on the demonstration's job, and return its output on a terminal of the film's size."""
    (folder / "job.toml").write_text(demo.SPEC.replace("MOST", "4"))
    (folder / "examples").symlink_to(demo.EXAMPLES)
    layout = Layout.from_settings(SCREEN)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (layout.rows, layout.cols))
    environment = os.environ | {"TERM": "xterm-16color"}  # the film's palette has only these colours
    command = [sys.executable, "-m", "tula_client.cli", *TUNE.split()]
    pieces: list[Piece] = []
    decoder = codecs.getincrementaldecoder("utf-8")()
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    with contextlib.suppress(OSError):  # raised when the last writer has closed the terminal
        while data := os.read(ours, 2**16):
            pieces.append((time.monotonic() - began, decoder.decode(data)))
    os.close(ours)
    if process.wait():
        raise TulaError(f"tula tune ended with exit code {process.returncode}: {''.join(text for _, text in pieces)}")
    return pieces


def film(pieces: Sequence[Piece]) -> str:
    """Return an animated SVG in which the command is typed and its output then appears within FILM_MS.

    If the reader prefers reduced motion, the SVG shows the last frame. The window is always dark.
    """
    layout = Layout.from_settings(SCREEN)
    screen = TerminalScreen(cols=layout.cols, rows=layout.rows)
    words = ["$", "tula", *TUNE.split()]
    for number, word in enumerate(words):
        screen.feed(f"{word} ", time_ms=number * TYPING_MS // len(words))
    screen.feed("\r\n", time_ms=TYPING_MS)
    speed = pieces[-1][0] * 1000 / FILM_MS
    for second, text in pieces:
        frame = int(second * 1000 / speed) // FRAME_MS
        screen.feed(text, time_ms=TYPING_MS + frame * FRAME_MS)
    faster = f", {speed:.0f} times as fast" if speed >= 1.5 else ""
    return render_svg(screen.snapshot(), settings=dataclasses.replace(SCREEN, title=f"tula tune{faster}"))


def measured_steps(job: JobHandle) -> list[list[str]]:
    """Return the four steps of the workflow, each as a title and lines with the numbers of this job."""
    answer, entries = job.recommendation(), job.client.ledger(job.id).entries
    followed = next(entry for entry in entries if entry.measured_step_time_s is not None)
    return steps_of(answer, followed)


def steps_of(answer: Recommendation, followed: LedgerEntry) -> list[list[str]]:
    """Return the steps' titles and lines, from a recommendation and the ledger entry of the run that followed it."""
    chosen, predicted = followed.configuration, followed.predicted_step_time_s
    assert chosen is not None
    assert predicted is not None
    assert followed.error is not None
    nodes, profiled = chosen.num_nodes, sum(each.profiled for each in answer.candidates)
    return [
        ["Profile", f"{profiled} of {len(answer.candidates)} candidates", f"{answer.model.num_samples} steps"],
        ["Fit", "step time and memory", "of every candidate"],
        [
            "Recommend",
            f"{nodes} {'node' if nodes == 1 else 'nodes'}, batch {chosen.global_batch_size}",
            f"{duration(predicted.value)} a step",
        ],
        [
            "Train",
            f"measured: {duration(followed.measured_step_time_s)} a step",
            f"{percent(abs(followed.error))} {'more' if followed.error > 0 else 'less'} than predicted",
        ],
    ]


def workflow(steps: list[list[str]]) -> str:
    """Return an SVG with one box per step from left to right, readable on light and dark pages, with bold titles."""
    height = LINE * (max(map(len, steps)) + 1)
    drawn = []
    for number, lines in enumerate(steps):
        left = 1 + number * (BOX + GAP)
        drawn.append(
            f'<rect x="{left}" y="1" width="{BOX}" height="{height}" rx="10" fill="#eef6f7" stroke="#1d7f8c"/>'
        )
        for row, text in enumerate(lines, start=1):
            weight = ' font-weight="bold"' if row == 1 else ""
            drawn.append(f'<text x="{left + 14}" y="{6 + row * LINE}"{weight}>{html.escape(text)}</text>')
        if number:
            drawn.append(f'<path d="M{left - GAP + 4} {1 + height / 2}h{GAP - 8}m-7 -5l7 5l-7 5"/>')
    width = len(steps) * (BOX + GAP) - GAP + 2
    about = html.escape("; ".join(f"{first}: {', '.join(rest)}" for first, *rest in steps))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 2}" role="img" aria-label="{about}" '
        f'font-family="sans-serif" font-size="14" fill="#12202a">\n'
        + "\n".join(drawn).replace("<path ", '<path fill="none" stroke="#1d7f8c" stroke-width="2" ')
        + "\n</svg>\n"
    )


def keep(screenshot: bytes, output: Path) -> None:
    """Write a screenshot with fewer colours, which reduces the file to a quarter of its size."""
    Image.open(io.BytesIO(screenshot)).quantize(COLOURS).save(output, optimize=True)
    print(f"{output}: {output.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
