"""How long large pages take in a headless Chromium.

A run of a million steps is opened, asked for again, and zoomed into; a job of a thousand candidates is opened to its
chart of time against cost, and the comparison of its 200 training runs to the chart that draws the loss of them all.

`open` is from asking for the page to its chart being drawn, with what the browser keeps of earlier pages, from an empty
page and a service at rest; `again` the same steps requested again, as when values arrive; `zoom` a stretch of ten
thousand steps.

    python -m benchmarks.dashboard [--json OUT] [--smoke]

`--smoke` draws each once: its figures only show that the benchmark works.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence

from playwright.sync_api import Page, sync_playwright

from benchmarks.support.chromium import FLAGS, chromium_path
from benchmarks.support.report import median, parser_of, write_json
from benchmarks.support.seed import a_crowded_job, a_million_steps, seed
from benchmarks.support.server import Server

TARGET_S = 1.0
TIMES = 8
REST_S = 1.0
"""Between two pages, for the charts further down the one before, which the service still makes."""
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
        made = seed(server.url)
        run_id = a_million_steps(made)
        crowded = f"{server.url}/jobs/{a_crowded_job(made, num_runs=5 if options.smoke else 200)}"
        page = playwright.chromium.launch(executable_path=path, args=FLAGS).new_page()
        taken: dict[str, list[float]] = defaultdict(list)
        for _ in range(1 if options.smoke else TIMES):
            taken["million_steps.open"].append(opened(page, f"{server.url}/runs/{run_id}", "/loss"))
            taken["million_steps.again"].append(drawn(page, "() => document.querySelector('#zoom').requestSubmit()"))
            taken["million_steps.zoom"].append(drawn(page, ZOOM))
            taken["thousand_candidates.open"].append(opened(page, crowded, "frontier"))
            taken["two_hundred_runs.open"].append(opened(page, f"{crowded}/quality", "quality"))
    figures: dict[str, float] = {}
    for name, seconds in taken.items():
        figures |= {f"{name}.median_s": median(seconds), f"{name}.best_s": min(seconds)}
    for key, value in figures.items():
        print(f"{key} = {value:.2f}  (to reach: under {TARGET_S:.0f})")
    write_json(options.json, figures)
    return 0


def opened(page: Page, address: str, chart: str) -> float:
    """Seconds from asking for the page to the chart whose address holds `chart` being drawn."""
    page.goto("about:blank")
    time.sleep(REST_S)
    started = time.perf_counter()
    page.goto(address, wait_until="domcontentloaded")
    figure = page.locator(f"[data-chart*='{chart}']").element_handle()
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
