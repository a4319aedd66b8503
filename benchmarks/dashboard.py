"""How long a run of a million steps takes from asking for its chart to its being drawn, in a headless Chromium.

python -m benchmarks.dashboard [--json OUT]
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from benchmarks._report import median, write_json
from tests.browser.conftest import FLAGS, NAMES
from tests.browser.seed import a_million_steps, seed
from tests.support.server import Server

TARGET_S = 1.0
TIMES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        parser.error("no Chromium on the PATH: install it (tests/system-packages.sh).")
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(f"{folder}/tula.db") as server,
        sync_playwright() as playwright,
    ):
        run_id = a_million_steps(seed(server.url))
        page = playwright.chromium.launch(executable_path=path, args=FLAGS).new_page()
        page.goto(f"{server.url}/runs/{run_id}")
        taken = [redraw(page) for _ in range(TIMES)]
    figures = {"million_steps.median_s": median(taken), "million_steps.best_s": min(taken)}
    for key, value in figures.items():
        print(f"{key} = {value:.2f}  (to reach: under {TARGET_S:.0f})")
    if options.json:
        write_json(options.json, figures)
    return 0


def redraw(page: Page) -> float:
    """Seconds from asking for the loss of a million steps again to its being drawn."""
    figure = page.locator("[data-chart$='/loss']")
    figure.scroll_into_view_if_needed()
    page.wait_for_function("(figure) => Number(figure.dataset.drawn) > 0", arg=figure.element_handle())
    drawn = int(figure.get_attribute("data-drawn") or 0)
    started = time.perf_counter()
    figure.locator("form.zoom").evaluate("(form) => form.requestSubmit()")
    page.wait_for_function("([figure, n]) => Number(figure.dataset.drawn) > n", arg=[figure.element_handle(), drawn])
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
