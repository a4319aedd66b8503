"""Pictures of the documents: `make pictures` serves, tunes and trains the digits, and photographs pages of that run.

    python -m docs.pictures [--epochs 20] [--output docs/pictures]

Takes about two minutes, and Chromium (tests/system-packages.sh).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from benchmarks.support.chromium import FLAGS, chromium_path
from examples import demo
from tula_client import Client

WIDTH, HEIGHT, COLOURS = 1280, 860, 256
PICTURES = ("job", "frontier", "run")
"""A job's page, its chart of time against cost, and a training run's page."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make every picture; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the training")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "pictures", help="folder for them")
    options = parser.parse_args(arguments)
    if (chromium := chromium_path()) is None:
        parser.error("there is no Chromium: install the packages of tests/system-packages.sh")
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory(prefix="tula-pictures-") as folder, demo.service(Path(folder)) as url:
        os.environ["TULA_URL"] = url
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
            keep(page.screenshot(), options.output / "job.png")
            keep(frontier.screenshot(), options.output / "frontier.png")
            page.goto(f"{url}/runs/{trained.id}")
            page.wait_for_load_state("networkidle")
            keep(page.screenshot(), options.output / "run.png")
    return 0


def keep(screenshot: bytes, output: Path) -> None:
    """Write a picture in few colours, which makes it a quarter as large."""
    Image.open(io.BytesIO(screenshot)).quantize(COLOURS).save(output, optimize=True)
    print(f"{output}: {output.stat().st_size / 1024:.0f} KiB", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
