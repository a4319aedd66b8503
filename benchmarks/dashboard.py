"""How long a run of a million steps takes to be opened, asked for again, and zoomed into, in a headless Chromium.

`open` is from asking for the page to its chart being drawn, with what the browser keeps of earlier pages; `again` the
same steps requested again, as when values arrive; `zoom` a stretch of ten thousand steps.

    python -m benchmarks.dashboard [--json OUT] [--smoke]

`--smoke` draws each once: its figures only show that the benchmark works.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

from playwright.sync_api import Page, sync_playwright

from benchmarks.support.chromium import FLAGS, chromium_path
from benchmarks.support.report import median, parser_of, write_json
from benchmarks.support.seed import a_million_steps, seed
from benchmarks.support.server import Server

TARGET_S = 1.0
TIMES = 8
ZOOM = """() => {
  const form = document.querySelector("#zoom");
  form.elements.first_step.value = 500000;
  form.elements.last_step.value = 509999;
  form.requestSubmit();
}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; answers the exit status."""
    parser = parser_of("dashboard", __doc__)
    options = parser.parse_args(arguments)
    path = chromium_path()
    if path is None:
        parser.error("no Chromium on the PATH: install it (tests/system-packages.sh).")
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(f"{folder}/tula.db") as server,
        sync_playwright() as playwright,
    ):
        run_id = a_million_steps(seed(server.url))
        page = playwright.chromium.launch(executable_path=path, args=FLAGS).new_page()
        taken: dict[str, list[float]] = {"open": [], "again": [], "zoom": []}
        for _ in range(1 if options.smoke else TIMES):
            taken["open"].append(opened(page, f"{server.url}/runs/{run_id}"))
            taken["again"].append(drawn(page, "() => document.querySelector('#zoom').requestSubmit()"))
            taken["zoom"].append(drawn(page, ZOOM))
    figures: dict[str, float] = {}
    for name, seconds in taken.items():
        figures |= {f"million_steps.{name}.median_s": median(seconds), f"million_steps.{name}.best_s": min(seconds)}
    for key, value in figures.items():
        print(f"{key} = {value:.2f}  (to reach: under {TARGET_S:.0f})")
    write_json(options.json, figures)
    return 0


def opened(page: Page, address: str) -> float:
    """Seconds from asking for the page to the loss being drawn."""
    started = time.perf_counter()
    page.goto(address, wait_until="domcontentloaded")
    figure = page.locator("[data-chart$='/loss']").element_handle()
    figure.evaluate("(figure) => figure.scrollIntoView()")
    page.wait_for_function("(figure) => Number(figure.dataset.drawn || 0) > 0", arg=figure)
    return time.perf_counter() - started


def drawn(page: Page, action: str) -> float:
    """Seconds from an action on the page to the loss being drawn once more."""
    figure = page.locator("[data-chart$='/loss']").element_handle()
    before = int(figure.get_attribute("data-drawn") or 0)
    started = time.perf_counter()
    figure.evaluate(action)
    page.wait_for_function("([figure, n]) => Number(figure.dataset.drawn || 0) > n", arg=[figure, before])
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
