"""The dashboard for those who dislike motion, or keep many pages open (WCAG 2.1, 2.3.3)."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from playwright.sync_api import Browser, Page, Route, expect

from benchmarks.support.forked import Server
from benchmarks.support.seed import Seeded
from tula_wire import routes

Visit = Callable[..., Page]

HIDE = """hidden => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""
MOVING = """[...document.querySelectorAll('*')].filter((node) => {
  const style = getComputedStyle(node);
  return style.animationName !== 'none' || style.transitionDuration.split(', ').some((each) => parseFloat(each) > 0);
}).map((node) => node.outerHTML.slice(0, 80))"""


def test_nothing_moves_for_those_who_asked_for_less_motion(chromium: Browser, server: Server, seeded: Seeded) -> None:
    context = chromium.new_context(reduced_motion="reduce", viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{server.url}/jobs/{seeded.job_id}")
    page.locator("[data-chart*='tradeoff']").first.scroll_into_view_if_needed()
    page.locator("[data-chart*='tradeoff'] svg.marks").first.hover()
    assert page.evaluate(MOVING) == []
    context.close()


def test_pages_out_of_sight_leave_the_browsers_connections_to_others(
    chromium: Browser, server: Server, seeded: Seeded
) -> None:
    """A browser opens six connections to a host; with a stream in each of six tabs, a seventh would load for ever."""
    context = chromium.new_context()
    pages = []
    for _ in range(7):
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.goto(f"{server.url}/jobs/{seeded.job_id}")
        expect(page.locator("#live")).to_have_text("live")
        page.evaluate(HIDE, True)
        pages.append(page)
    body = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": 32}, "holder": "seed"}
    run_id = seeded.post(routes.JOB_RUNS.format(job_id=seeded.job_id), body)["id"]
    pages[0].evaluate(HIDE, False)
    expect(pages[0].locator("[data-live='plan']").get_by_text(run_id)).to_be_visible()
    seeded.patch(run_id, state="running")
    expect(pages[0].locator("[data-live='plan'] tr", has_text=run_id).locator(".state")).to_have_text("running")
    context.close()


def test_an_answer_that_comes_late_does_not_undo_a_newer_one(visit: Visit, seeded: Seeded) -> None:
    body = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": 64}, "holder": "seed"}
    run_id = seeded.post(routes.JOB_RUNS.format(job_id=seeded.job_id), body)["id"]
    page = visit(f"/runs/{run_id}")
    expect(page.locator("#live")).to_have_text("live")
    held: list[Route] = []
    page.route(f"**/runs/{run_id}", lambda route: route.continue_() if held else held.append(route))
    state = page.locator("[data-live='head'] .state")
    with page.expect_request(f"**/runs/{run_id}"):
        seeded.patch(run_id, state="running")
    old = httpx.get(f"{seeded.url}/runs/{run_id}", headers={"Accept": "text/html"}).text
    assert ">running<" in old
    seeded.patch(run_id, state="succeeded")
    expect(state).to_have_text("succeeded")
    with page.expect_event("requestfinished"):
        held[0].fulfill(body=old, content_type="text/html")
    page.evaluate("new Promise(requestAnimationFrame)")
    expect(state).to_have_text("succeeded")
