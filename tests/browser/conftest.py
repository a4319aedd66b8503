"""A real Chromium against a real `tula serve`, and a picture of every page kept under artefacts/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.support.chromium import FLAGS, chromium_path
from benchmarks.support.forked import Server
from benchmarks.support.seed import Seeded, seed

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts" / "screenshots"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder drives a browser."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")  # Playwright's loop occupies this thread: no other test could start one
def chromium() -> Iterator[Browser]:
    """The system's Chromium, started once."""
    path = chromium_path()
    assert path is not None, "No Chromium: install the packages of tests/system-packages.sh."
    expect.set_options(timeout=20_000)  # a busy machine decides nothing
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service in its own process, on an empty database."""
    with Server(str(tmp_path_factory.mktemp("browser") / "tula.db")) as running:
        yield running


@pytest.fixture(scope="session")
def seeded(server: Server) -> Seeded:
    """A job that was profiled and trained through the public API."""
    return seed(server.url)


@pytest.fixture
def visit(chromium: Browser, server: Server) -> Iterator[Callable[..., Page]]:
    """Opens a page of the service; whatever its console complains of fails the test."""
    complaints: list[str] = []
    opened = []

    def open_page(path: str, *, scheme: str = "light", width: int = 1280) -> Page:
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
        opened.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on(
            "request",
            lambda asked: None if asked.url.startswith((server.url, "data:")) else complaints.append(asked.url),
        )
        page.goto(server.url + path)
        return page

    yield open_page
    for context in opened:
        context.close()
    assert complaints == []


def picture(page: Page, name: str) -> Path:
    """A screenshot of the whole page."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    path = ARTEFACTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path
