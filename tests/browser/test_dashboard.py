"""Tests the dashboard in a real Chromium: with no, little and much data, dark and light, on laptop and phone.

Some tests are about readers who prefer reduced motion (WCAG 2.1, 2.3.3) or who keep many pages open.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, Route, expect

from benchmarks.support.forked import Server
from benchmarks.support.seed import Seeded, a_hundred_thousand_steps, specification
from tests.browser.conftest import picture
from tula_wire import routes

Visit = Callable[..., Page]

STRUCTURE = (Path(__file__).parent / "checks.js").read_text(encoding="utf-8").partition("\n")[2]
SIDEWAYS = "document.documentElement.scrollWidth - innerWidth"
AXE = Axe()
HIDE = """hidden => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""
MOVING = """[...document.querySelectorAll('*')].filter((node) => {
  const style = getComputedStyle(node);
  return style.animationName !== 'none' || style.transitionDuration.split(', ').some((each) => parseFloat(each) > 0);
}).map((node) => node.outerHTML.slice(0, 80))"""
UNFADED = """document.querySelectorAll('.canvas').forEach((canvas) => {
  Object.assign(canvas.style, { transition: 'none', opacity: '1' });
})"""
WCAG = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}


def draw_all(page: Page) -> None:
    """Bring every chart into view, and wait until it is drawn or says why it is not."""
    for figure in page.locator("[data-chart]").all():
        figure.evaluate("figure => figure.scrollIntoView({block: 'center'})")  # while charts above it still grow
        expect(figure.locator(".marks, .waiting:not(:text-is('Loading…'))").first).to_be_attached()
        expect(figure.locator(".failed")).to_have_count(0)


def draw(page: Page, chart: str) -> Locator:
    """Scroll to the chart whose address ends in `chart`, wait until it is drawn, and return its figure."""
    figure = page.locator(f"[data-chart$='{chart}']")
    figure.scroll_into_view_if_needed()
    expect(figure.locator("svg.marks")).to_be_visible()
    return figure


@pytest.fixture(scope="session")
def followed(seeded: Seeded) -> str:
    """Create a training run whose steps take a fifth longer than the recommendation predicts; return its id."""
    job_id = seeded.post(routes.JOBS, specification("followed"))["job"]["id"]
    path = routes.JOB_RECOMMENDATION.format(job_id=job_id)
    best = httpx.get(seeded.url + path, timeout=60).json()["chosen"]
    body = {"kind": "train", "configuration": best["configuration"], "holder": "seed"}
    run_id = str(seeded.post(routes.JOB_RUNS.format(job_id=job_id), body)["id"])
    seeded.patch(run_id, state="running")
    ranks = best["configuration"]["num_nodes"] * best["configuration"]["ranks_per_node"]
    samples = {"rank": 0, "boot_id": "b", "world_size": ranks, "sequence": [*range(9)], "step": [*range(9)]}
    samples["step_time_s"] = [1.2 * best["step_time_s"]["value"]] * 9
    seeded.post(routes.RUN_SAMPLES.format(run_id=run_id), samples)
    seeded.patch(run_id, state="succeeded")
    return run_id


def accessible(page: Page) -> None:
    """Assert that axe finds no violation of WCAG 2.1, levels A and AA, such as low contrast or unnamed controls."""
    page.evaluate(UNFADED)  # charts fade for the moment in which they load again, as they do after each event
    found = AXE.run(page, context={"exclude": [["svg.marks > *"]]}, options=WCAG).response["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


def wait_until(page: Page, condition: str) -> None:
    """Wait until a JavaScript condition is true, for example until a chart follows a new width.

    `wait_for_function` cannot be used, since it evaluates text inside the page, which the page's policy forbids.
    """
    ends = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(50)


def check(page: Page, name: str) -> None:
    """Assert that the page is accessible, has ordered headings, and does not scroll sideways; store a picture."""
    assert page.evaluate(SIDEWAYS) <= 0
    assert page.evaluate(STRUCTURE) == []
    assert page.locator("h1").count() == 1
    accessible(page)
    assert picture(page, name).stat().st_size > 5000


def enlarged(page: Page) -> None:
    """Assert that a page at 200 and 400 % needs no sideways scrolling, and that its text grows (WCAG 1.4.4, 1.4.10)."""
    for zoom in (2, 4):  # 1280 points wide at 200 % and 400 % are 640 and 320
        page.set_viewport_size({"width": 1280 // zoom, "height": 900 // zoom})
        assert page.evaluate(SIDEWAYS) <= 0, zoom
    page.set_viewport_size({"width": 1280, "height": 900})
    small = page.evaluate("document.querySelector('h1').getBoundingClientRect().height")
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    assert page.evaluate("document.querySelector('h1').getBoundingClientRect().height") >= 1.9 * small
    letters = "parseFloat(getComputedStyle(document.body).fontSize)"
    assert page.evaluate(letters) == pytest.approx(30), "letters follow the size that the reader has chosen"
    assert page.evaluate(SIDEWAYS) <= 0


def test_every_page_of_an_empty_service_is_designed(empty_service: Server, visit: Visit) -> None:
    page = visit("/", url=empty_service.url)
    expect(page.get_by_role("heading", name="No job yet")).to_be_visible()
    check(page, "empty-jobs")
    made = httpx.post(empty_service.url + routes.JOBS, json=specification(), timeout=60).json()
    path = routes.JOB_RUNS.format(job_id=made["job"]["id"])
    body = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": 32}}
    run = httpx.post(empty_service.url + path, json=body, timeout=60).json()
    for name, address in {
        "job": f"/jobs/{made['job']['id']}",
        "run": f"/runs/{run['id']}",
        "admin": "/admin",
    }.items():
        page.goto(empty_service.url + address)
        draw_all(page)
        check(page, f"empty-{name}")
    page.goto(f"{empty_service.url}/jobs/{made['job']['id']}/quality")
    expect(page.get_by_role("heading", name="Nothing to compare yet")).to_be_visible()
    check(page, "empty-quality")


@pytest.mark.parametrize("name", ["jobs", "new", "job", "run", "quality", "accuracy", "admin", "login"])
def test_every_page_fits_laptop_and_phone_in_both_schemes_and_those_who_enlarge_it_or_dislike_motion(
    visit: Visit, seeded: Seeded, name: str, request: pytest.FixtureRequest
) -> None:
    job = f"/jobs/{seeded.job_id}"
    paths = {"jobs": "/", "new": "/jobs/new", "job": job, "run": f"/runs/{seeded.runs['ags']}"}
    paths |= {"quality": f"{job}/quality", "login": "/login?next=/"}
    if name == "accuracy":
        request.getfixturevalue("followed")
    page = visit(paths.get(name, f"/{name}"))
    if name == "job":
        page.get_by_text("Change objective, limits or prices").press("Enter")
    draw_all(page)
    charts = page.locator(".marks").all()[:1]
    assert bool(page.evaluate(MOVING)) == bool(charts)
    page.emulate_media(reduced_motion="reduce")
    for chart in charts:
        chart.hover()
    assert page.evaluate(MOVING) == []
    page.emulate_media(reduced_motion="no-preference")
    for scheme, width in (("light", 1280), ("dark", 390)):  # no place depends on a colour
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        draw_all(page)
        wait_until(page, "[...document.querySelectorAll('.canvas')].every(c => c.scrollWidth <= c.clientWidth)")
        check(page, f"{name}-{scheme}-{width}")
    enlarged(page)


def test_an_address_that_leads_nowhere_is_a_designed_page(visit: Visit, complaints: list[str]) -> None:
    page = visit("/jobs/nowhere")
    assert complaints == ["Failed to load resource: the server responded with a status of 404 (Not Found)"]
    complaints.clear()
    check(page, "error")


def test_the_reference_of_the_api_is_drawn_from_local_files(visit: Visit) -> None:
    expect(visit("/docs").locator("body")).to_contain_text("/v1/jobs/{job_id}/runs")


def test_the_trade_off_names_what_the_table_recommends_and_is_saved_as_a_file(
    visit: Visit, seeded: Seeded, tmp_path: Path
) -> None:
    page = visit(f"/jobs/{seeded.job_id}")
    expect(page.locator("[data-live='plan']")).to_contain_text(re.compile(r"profiling has used .* of GPU time"))
    drawn = page.locator("[data-chart*='tradeoff?quantity=time']")
    drawn.scroll_into_view_if_needed()
    expect(drawn.locator("svg")).to_contain_text("recommended")
    for table, times in (("answer", 2), ("candidates", 1)):  # the answer begins with the points to choose among
        rows = page.locator(f"[data-live='{table}'] tr", has=page.get_by_text(re.compile("^recommended")))
        expect(rows).to_have_count(times)
    for kind, begin in (("png", b"\x89PNG"), ("svg", b"<svg")):
        with page.expect_download() as saved:
            drawn.locator(f"[data-save={kind}]").click()
        assert saved.value.suggested_filename.endswith(f".{kind}")
        saved.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes().startswith(begin)


def test_the_what_if_form_answers_while_one_types_and_explains_a_wrong_value(
    visit: Visit, seeded: Seeded, complaints: list[str]
) -> None:
    page = visit(f"/jobs/{seeded.job_id}")
    answer = page.locator("#whatif-answer")
    answer.scroll_into_view_if_needed()
    expect(answer.locator("tbody tr")).to_have_text(re.compile("same"))  # the recommendation, before anything is typed
    page.get_by_role("textbox", name="Nodes").fill("2, 4")
    page.get_by_role("textbox", name="Global batch").fill("256")
    expect(answer.locator("tbody tr")).to_have_count(2)
    before = answer.inner_text()
    page.get_by_role("textbox", name="USD per node-hour").fill("30.6")
    expect(answer).not_to_have_text(before)
    page.get_by_role("textbox", name="Deadline (hours)").fill("0.001")
    expect(answer.locator("tr.excluded")).to_have_count(2)
    check(page, "what-if")
    assert complaints == []
    page.get_by_role("textbox", name="Nodes").fill("two")
    expect(page.locator("#whatif-answer .warning")).to_contain_text("nodes")
    complaints.clear()


def test_a_click_on_the_frontier_asks_what_if(visit: Visit, seeded: Seeded) -> None:
    page = visit(f"/jobs/{seeded.job_id}", scheme="dark", width=390)
    figure = page.locator("[data-chart*='frontier']")
    figure.scroll_into_view_if_needed()
    expect(figure.locator("svg.marks")).to_contain_text("recommended")
    asked = (
        "(all) => all.findIndex((mark) => mark.__data__.datum.configuration?.startsWith('2 nodes, global batch 128'))"
    )
    points = figure.locator("svg.marks .mark-symbol.role-mark path")
    point = points.nth(points.evaluate_all(asked))
    point.hover()
    expect(page.locator(".vg-tooltip")).to_contain_text("2 nodes, global batch 128 (local 64)")
    point.click()
    expect(page.get_by_role("textbox", name="Nodes")).to_have_value("2")
    expect(page.get_by_role("textbox", name="Global batch")).to_have_value("128")
    expect(page.locator("#whatif-answer tbody tr")).to_have_text(re.compile("2 nodes, global batch 128 "))
    choice = figure.get_by_role("combobox", name="Use in what-if")
    choice.focus()
    choice.press("ArrowDown")
    choice.press("ArrowDown")
    nodes = re.search(r"(\d+) nodes?, global batch (\d+)", choice.locator("option").nth(2).inner_text())
    assert nodes is not None
    expect(page.get_by_role("textbox", name="Nodes")).to_have_value(nodes[1])
    expect(page.get_by_role("textbox", name="Global batch")).to_have_value(nodes[2])


def test_a_run_is_live_one_pointer_reads_every_chart_and_zoom_asks_for_more(visit: Visit, seeded: Seeded) -> None:
    run_id = seeded.runs["ags"]
    page = visit(f"/runs/{run_id}")
    expect(page.locator("#live")).to_have_text("live")
    norm, figure = draw(page, "/gradient").locator(".readout"), draw(page, "/loss")
    expect(figure.locator(".subtitle")).to_contain_text("of 3,000 points")
    expect(figure.locator(".readout")).to_have_text(re.compile(r"^Last step 2,999: loss [\d.]+$"))
    box = figure.locator("svg.marks").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
    expect(figure.locator(".readout")).to_have_text(re.compile(r"^At step 1,\d{3}: loss [\d.]+$"))
    expect(norm).to_have_text(re.compile(r"^At step 1,\d{3}: grad norm [\d.]+, gradient variability [\d.]+$"))
    seeded.telemetry(run_id, 1, range(3000, 3010), {"loss": [0.5] * 10})
    expect(figure.locator(".subtitle")).to_contain_text("of 3,010 points")
    with page.expect_response(lambda answer: "charts/loss" in answer.url and "first_step=100" in answer.url) as zoomed:
        page.get_by_label("From step").fill("100")
        page.get_by_label("to", exact=True).fill("120")
        page.get_by_role("button", name="Show").press("Enter")
    assert [row["step"] for row in zoomed.value.json()["datasets"]["loss"]] == list(range(100, 121))
    assert "first_step=100" in page.url, "the address keeps the view, so that it can be shared"
    with page.expect_response(lambda answer: "charts/loss" in answer.url and "first_step" not in answer.url):
        page.get_by_role("button", name="All steps").click()
    expect(figure.locator(".subtitle")).to_contain_text("of 3,010 points")
    box = draw(page, "/loss").locator("svg.marks").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] * 0.5
    with page.expect_response(lambda answer: "charts/loss" in answer.url and "first_step" in answer.url) as zoomed:
        page.mouse.move(box["x"] + box["width"] * 0.4, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=4)
        page.mouse.up()
    steps = [row["step"] for row in zoomed.value.json()["datasets"]["loss"]]
    assert 600 < steps[0] < steps[-1] < 2400


def test_any_metric_of_a_run_is_smoothed_on_a_logarithmic_axis_and_compared_with_other_runs(
    visit: Visit, seeded: Seeded
) -> None:
    """The page also shows the output as text and, for a column that ended early, the step of its last value."""
    body = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": 32}, "holder": "seed"}
    run_id = str(seeded.post(routes.JOB_RUNS.format(job_id=seeded.job_id), body)["id"])
    seeded.telemetry(run_id, 0, range(5, 1200, 10), {"eval_loss": [5 * 0.97**at for at in range(120)]})
    page = visit(f"/runs/{run_id}", scheme="dark", width=390)
    expect(page.locator("#live")).to_have_text("live")
    expect(page.locator("[data-live='facts']")).to_contain_text("not known yet")  # whether a rank keeps others waiting
    figure = page.locator("[data-chart$='/eval_loss']")
    figure.scroll_into_view_if_needed()
    expect(figure.locator("svg.marks .mark-symbol.role-mark path")).to_have_count(120)
    with page.expect_response(lambda answer: "charts/eval_loss" in answer.url and "logarithmic=true" in answer.url):
        page.get_by_role("combobox", name="Values").select_option("logarithmic")
    page.get_by_role("combobox", name="Smoothing").select_option("strong")
    expect(figure.locator(".subtitle")).to_have_text("Line: median of every 8 points")
    assert "logarithmic=true" in page.url
    ended = {"accuracy": [0.5] * 10, "validation_accuracy": [0.25] * 5 + [None] * 5}
    seeded.telemetry(run_id, 1, range(10), {"lr": [0.1] * 10, "gpu_utilization": [0.5, 0.9] * 5} | ended)
    hostile = "<img src=x onerror=\"document.title='run'\"></pre><script>document.title='run'</script>"
    lines = [f"epoch {at} loss {3 * 0.97**at:.4f} " + "=" * 60 for at in range(200)]
    seeded.patch(run_id, state="running", output="\n".join([*lines, hostile]))
    for name in ("lr", "gpu_utilization"):
        expect(page.locator(f"[data-chart$='/{name}']")).to_be_attached()
    readout = draw(page, "/accuracy").locator(".readout")
    expect(readout).to_have_text("Last step 9: accuracy 0.5, validation accuracy 0.25 (step 4)")
    output = page.get_by_role("region", name="Output of the first rank")
    expect(output).to_contain_text("epoch 199 loss")
    expect(output).to_contain_text("</pre><script>")
    assert page.title() == f"{run_id} · Tula"
    draw_all(page)
    check(page, "metrics-dark-390")
    figure.get_by_role("link", name="All runs").click()
    draw_all(page)
    expect(page.get_by_role("combobox", name="Metric")).to_have_value("eval_loss")
    expect(page.locator("[data-live='compared'] tbody tr")).to_have_count(1)


def test_accuracy_over_all_jobs_is_charted_and_tabled(visit: Visit, followed: str) -> None:
    page = visit("/", scheme="dark", width=390)
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Accuracy").click()
    draw_all(page)
    expect(page.locator("svg.marks")).to_have_count(2)
    expect(page.get_by_role("region", name="Errors by network and device").locator("tbody tr")).to_contain_text(
        "resnet50V100-16GB"
    )
    expect(page.get_by_role("link", name=followed)).to_be_visible()
    page.locator("[data-chart$='/accuracy'] svg.marks .mark-symbol.role-mark path").first.hover(force=True)
    expect(page.locator(".vg-tooltip")).to_contain_text("resnet50 on V100-16GB")
    accessible(page)


def test_a_job_is_pasted_corrected_changed_and_archived_with_the_keyboard_alone(
    visit: Visit, complaints: list[str]
) -> None:
    page = visit("/", scheme="dark", width=390)
    page.get_by_role("link", name="New job").press("Enter")
    text = page.get_by_role("textbox", name="Specification")
    wrong = text.input_value().replace('name = "resnet50"', 'name = "pasted"', 1).replace("max_nodes", "max_node")
    text.fill(wrong)
    page.get_by_role("button", name="Register").press("Enter")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("cluster.0.max_node: is not a known field")
    expect(text).to_have_value(wrong)
    check(page, "new-refused-dark-390")
    text.fill(wrong.replace("max_node", "max_nodes"))
    page.get_by_role("button", name="Register").press("Enter")
    expect(page.get_by_role("heading", name="pasted")).to_be_visible()
    page.get_by_text("Change objective, limits or prices").press("Enter")
    page.get_by_label("Deadline (hours)").first.fill("a week")
    expect(page.get_by_role("button", name="Save")).to_be_enabled()  # by the script, which loads after the charts'
    page.get_by_role("button", name="Save").press("Enter")
    expect(problem).to_contain_text("limits.deadline_s: ")
    expect(page.get_by_label("Deadline (hours)").first).to_have_value("a week")
    page.get_by_label("Deadline (hours)").first.fill("50")
    page.get_by_label("Node-hour", exact=True).fill("3.06")
    page.get_by_role("combobox", name="Objective").select_option("cost")
    page.get_by_role("button", name="Save").press("Enter")
    expect(page.get_by_role("link", name="cost", exact=True)).to_have_attribute("aria-current", "true")
    page.get_by_text("Specification").press("Enter")
    expect(page.locator("[data-kept='spec']")).to_contain_text("deadline 2 d 2 h")
    expect(page.locator("[data-kept='spec']")).to_contain_text("$3.06 per node-hour")
    page.get_by_role("button", name="Archive").press("Enter")
    expect(page.locator("[data-live='head'] .state")).to_have_text("archived")
    page.get_by_role("button", name="Unarchive").press("Enter")
    expect(page.locator("[data-live='head'] .state")).to_have_text("planning")
    unread = "Failed to load resource: the server responded with a status of 422 (Unprocessable Entity)"
    assert complaints == [unread, unread]
    complaints.clear()


def test_live_updates_survive_a_restart_of_the_service(visit: Visit, complaints: list[str], tmp_path: Path) -> None:
    database = str(tmp_path / "tula.db")
    first = Server(database)
    made = httpx.post(first.url + routes.JOBS, json=specification(), timeout=60).json()
    visit("/login")  # so that the next page is one that can be closed
    page = visit(f"/jobs/{made['job']['id']}", url=first.url)
    expect(page.locator("#live")).to_have_text("live")
    port = first.port
    first.kill()
    expect(page.locator("#live")).to_have_text("reconnecting…", timeout=15_000)
    with Server(database, port=port) as second:
        expect(page.locator("#live")).to_have_text("live", timeout=30_000)
        path = routes.JOB_CLAIM.format(job_id=made["job"]["id"])
        claimed = httpx.post(second.url + path, json={"holder": "test"}, timeout=60).json()["run"]
        row = page.locator("[data-live='plan'] tr", has_text=claimed["id"])
        expect(row.locator(".state")).to_have_text("claimed", timeout=15_000)
        page.close()  # before the service stops, of which its console would complain, too
    assert "Failed to load resource: net::ERR_INCOMPLETE_CHUNKED_ENCODING" in complaints
    assert all(said.startswith("Failed to load resource: net::ERR_") for said in complaints)
    complaints.clear()


def test_keyboard_alone_reaches_content_and_scheme(visit: Visit) -> None:
    page = visit("/", scheme="light")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.locator("#theme").focus()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.keyboard.press("Enter")
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate("document.documentElement.dataset.scheme") == "dark"


def test_a_failing_chart_says_so_and_can_be_tried_again(visit: Visit, seeded: Seeded) -> None:
    page = visit("/login")
    page.route("**/charts/memory", lambda route: route.fulfill(status=200, body="not json"))
    page.goto(f"{seeded.url}/jobs/{seeded.job_id}")
    figure = page.locator("[data-chart$='/memory']")
    figure.scroll_into_view_if_needed()
    again = figure.get_by_role("button", name="Try again")
    expect(again).to_be_visible()
    unread = "node => Boolean(node.closest('[role=img]'))"
    assert not again.evaluate(unread), "screen readers skip what is inside an image"
    page.unroute("**/charts/memory")
    again.click()
    expect(figure.locator("svg.marks")).to_be_visible()
    assert figure.locator("svg.marks").evaluate(unread)


def test_a_hundred_thousand_steps_are_thinned_before_they_reach_the_page(visit: Visit, seeded: Seeded) -> None:
    figure = draw(visit(f"/runs/{a_hundred_thousand_steps(seeded)}"), "/loss")
    expect(figure.locator(".subtitle")).to_contain_text("of 100,000 points")
    subtitle = re.search(r"([\d,]+) of 100,000 points", figure.locator(".subtitle").inner_text())
    assert subtitle is not None
    assert 100 <= int(subtitle[1].replace(",", "")) <= 5_000


def test_a_token_is_created_displayed_once_and_revoked(
    empty_service: Server, visit: Visit, complaints: list[str]
) -> None:
    page = visit("/admin", url=empty_service.url)
    page.get_by_label("Name").first.fill("first")
    page.get_by_label("Scope").select_option("admin")
    page.get_by_role("button", name="Create a token").click()
    expect(page.locator("#secret code")).to_contain_text("tula_")
    secret = page.locator("#secret code").inner_text()
    page.goto(empty_service.url + "/admin")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.get_by_label("Token").fill("tula_wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("unknown")
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(empty_service.url + "/admin")
    assert secret not in page.content()
    page.get_by_label("Name").first.fill("second")
    page.get_by_role("button", name="Create a token").click()
    expect(page.locator("#secret code")).not_to_have_text("")
    page.reload()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Revoke second").click()
    expect(page.locator("tr", has_text="second")).to_contain_text("revoked")
    assert complaints == ["Failed to load resource: the server responded with a status of 401 (Unauthorized)"]
    complaints.clear()


def test_jobs_are_followed_sorted_and_archived_at_once_with_the_keyboard(visit: Visit, seeded: Seeded) -> None:
    page = visit("/?search=vgg", scheme="dark", width=390)
    expect(page.get_by_role("heading", name="No job matches")).to_be_visible()
    for place in (2, 3, 1):
        seeded.post(routes.JOBS, specification(f"vgg-{place}", epochs=place))
    expect(page.get_by_role("link", name="vgg-1")).to_be_visible(timeout=20_000)
    page.get_by_role("combobox", name="Sort by").select_option("name")
    page.get_by_role("button", name="Show").press("Enter")
    links = page.locator("table.jobs td:first-child a")
    expect(links).to_have_text(["vgg-1", "vgg-2", "vgg-3"])
    archive = page.get_by_role("button", name="Archive")
    expect(archive).to_be_disabled()
    page.get_by_role("checkbox", name="Select vgg-1").press("Space")
    page.get_by_role("checkbox", name="Select vgg-3").press("Space")
    check(page, "jobs-chosen-dark-390")
    seeded.post(routes.JOBS, specification("vgg-4"))
    page.evaluate("refreshParts()")
    expect(links).to_have_text(["vgg-1", "vgg-2", "vgg-3", "vgg-4"])
    expect(page.get_by_role("checkbox", name="Select vgg-3")).to_be_focused()
    expect(archive).to_have_text("Archive 2 selected")
    archive.press("Enter")
    expect(links).to_have_text(["vgg-2", "vgg-4"])


def test_pages_out_of_sight_leave_the_browsers_connections_to_others(visit: Visit, seeded: Seeded) -> None:
    """A browser opens six connections to a host; with a stream in each of six tabs, a seventh would load forever."""
    job_id = seeded.post(routes.JOBS, specification("out-of-sight"))["job"]["id"]
    pages = []
    for _ in range(7):
        page = visit(f"/jobs/{job_id}")
        expect(page.locator("#live")).to_have_text("live")
        page.evaluate(HIDE, True)
        pages.append(page)
    body = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": 32}, "holder": "seed"}
    run_id = seeded.post(routes.JOB_RUNS.format(job_id=job_id), body)["id"]
    pages[0].evaluate(HIDE, False)
    expect(pages[0].locator("[data-live='plan']").get_by_text(run_id)).to_be_visible()
    seeded.patch(run_id, state="running")
    expect(pages[0].locator("[data-live='plan'] tr", has_text=run_id).locator(".state")).to_have_text("running")


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
