"""Starts a real Chromium and a real `tula serve`, and stores a screenshot of every page under artefacts/."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.support.chromium import FLAGS, chromium_path
from benchmarks.support.forked import Server
from benchmarks.support.seed import Seeded, seed

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts" / "screenshots"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in this folder as a browser test."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")  # Playwright's loop occupies this thread: no other test could start one
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium once per module."""
    path = chromium_path()
    assert path is not None, "No Chromium: install the packages of tests/system-packages.sh."
    expect.set_options(timeout=20_000)  # a busy machine decides nothing
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, "--process-per-site"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a service in a separate process on an empty database."""
    with Server(str(tmp_path_factory.mktemp("browser") / "tula.db")) as running:
        yield running


@pytest.fixture(scope="session")
def seeded(server: Server) -> Seeded:
    """Create a job with profiling and training runs through the public API."""
    return seed(server.url)


@pytest.fixture(scope="module")
def tab(chromium: Browser) -> Iterator[Page]:
    """Open one page for all tests, since opening a page or profile costs Chromium a second of CPU time."""
    context = chromium.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def empty_service(tmp_path: Path) -> Iterator[Server]:
    """Start a service on an empty database for one test.

    A test requests this fixture before `visit`. Then pytest closes the pages before it stops the service; a page that
    is still open would request parts of itself and report that the service refuses the connection.
    """
    with Server(str(tmp_path / "tula.db")) as running:
        yield running


@pytest.fixture
def complaints() -> list[str]:
    """Return the list of errors on the consoles of visited pages; a test removes those that it expects."""
    return []


@pytest.fixture
def visit(tab: Page, server: Server, complaints: list[str]) -> Iterator[Callable[..., Page]]:
    """Yield a function that opens a page of the service, and fail the test if a console reports an error."""
    listeners: list[tuple[str, Callable[..., None]]] = []
    opened: list[Page] = []

    def open_page(
        path: str, *, scheme: Literal["light", "dark"] = "light", width: int = 1280, url: str = server.url
    ) -> Page:
        page = tab.context.new_page() if opened else tab
        opened.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme, reduced_motion="no-preference")
        page.set_default_timeout(20_000)
        heard: dict[str, Callable[..., None]] = {
            "pageerror": lambda error: complaints.append(str(error)),
            "console": lambda said: complaints.append(said.text) if said.type == "error" else None,
            "request": lambda asked: None if asked.url.startswith((url, "data:")) else complaints.append(asked.url),
        }
        for event, listener in heard.items():
            page.on(event, listener)  # type: ignore[call-overload]
        if page is tab:
            listeners.extend(heard.items())
        page.goto(url + path)
        return page

    yield open_page
    for page in opened[1:]:
        page.close()
    if opened:
        tab.evaluate("localStorage.clear()")
        tab.unroute_all()
        tab.goto("about:blank")
    for event, listener in listeners:
        tab.remove_listener(event, listener)
    tab.context.clear_cookies()
    assert complaints == []


def picture(page: Page, name: str) -> Path:
    """Take a screenshot of the whole page; return its path."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    path = ARTEFACTS / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    return path
