"""Tests that pages show what the service knows to those who may see it, and that no foreign script runs in them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from html import unescape

import httpx
import pytest
from fastapi import FastAPI

import tula_wire as wire
from tests.service.dashboard import models
from tula_service.api.auth import COOKIE
from tula_service.app import create_app
from tula_service.dashboard import pages
from tula_service.settings import Settings
from tula_service.store import DEFAULT_PROJECT_ID
from tula_service.store.ledger import LedgerRecord

HTML = {"Accept": "text/html"}


class Browser:
    """A browser that sends its requests to the application in this process."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.cookies = httpx.Cookies()
        self.loop = asyncio.new_event_loop()

    def __call__(self, method: str, path: str, **options: object) -> httpx.Response:
        """Send a request; return the response without following redirects."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=("127.0.0.1", 1))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", cookies=self.cookies
            ) as client:
                return await client.request(method, path, **options)  # type: ignore[arg-type]

        return self.loop.run_until_complete(send())

    def page(self, path: str, status: int = 200) -> str:
        """Return the text of a page."""
        answer = self("GET", path, headers=HTML)
        assert answer.status_code == status, answer.text
        assert answer.headers["content-type"].startswith("text/html")
        return unescape(answer.text)


@pytest.fixture
def browser(sqlite_url: str) -> Iterator[Browser]:
    """Return a browser on this machine, before any token exists."""
    app = create_app(Settings(database=sqlite_url))
    opened = Browser(app)
    yield opened
    opened.loop.close()
    app.state.services.store.close()


def register(browser: Browser, name: str = "resnet50-cifar", **more: object) -> str:
    """Register a job; return its id."""
    body = models.job().spec.model_dump(mode="json") | {"name": name} | more
    answer = browser("POST", wire.routes.JOBS, json=body)
    assert answer.status_code == 201, answer.text
    identity: str = answer.json()["job"]["id"]
    return identity


def train(browser: Browser, job_id: str, method: str = "ags", columns: tuple[str, ...] = ("accuracy",)) -> str:
    """Create a training run that reported these columns; return its id."""
    configuration = {"num_nodes": 2, "local_batch_size": 64}
    path = wire.routes.JOB_RUNS.format(job_id=job_id)
    run_id: str = browser(
        "POST", path, json={"kind": "train", "configuration": configuration, "method": method or None}
    ).json()["id"]
    chunk = {
        "boot_id": "b",
        "sequence": 0,
        "steps": list(range(30)),
        "columns": {name: [0.01 * i for i in range(30)] for name in columns},
    }
    assert browser("POST", wire.routes.RUN_TELEMETRY.format(run_id=run_id), json=chunk).status_code == 202
    return run_id


def token(browser: Browser, scope: str, **more: object) -> str:
    """Create a token; return its secret."""
    body = {"name": scope, "scope": scope} | more
    headers = {} if COOKIE not in browser.cookies else {"Authorization": f"Bearer {browser.cookies[COOKIE]}"}
    secret: str = browser("POST", wire.routes.TOKENS, json=body, headers=headers).json()["secret"]
    return secret


def test_without_jobs_the_first_page_says_how_to_begin(browser: Browser) -> None:
    page = browser.page("/")
    assert "No job yet" in page
    assert "tula tune" in page


def test_jobs_are_found_by_name_and_state_and_a_miss_is_explained(browser: Browser) -> None:
    register(browser, "alpha")
    register(browser, "beta", epochs=3)
    both, one = browser.page("/"), browser.page("/?search=alph&state=planning")
    assert ">alpha<" in both
    assert ">beta<" in both
    assert ">alpha<" in one
    assert ">beta<" not in one
    assert "No job matches" in browser.page("/?search=gamma")


def test_jobs_are_paged(browser: Browser) -> None:
    spec = models.job().spec.model_dump(mode="json") | {"objective": "knee"}
    with browser.app.state.services.store.transaction() as tx:  # none is planned, which takes most of a registration
        for place in range(51):
            tx.jobs.create(DEFAULT_PROJECT_ID, spec | {"name": f"job-{place:02}", "epochs": place + 1})
    first = browser.page("/?search=job")
    following = re.search(r'rel="next" href="([^"]+)"', first)
    assert following is not None
    assert "search=job" in following[1]
    second = browser.page(following[1])
    assert 'href="/?search=job">Newest jobs' in second
    assert ">job-00<" in second
    assert ">job-50<" not in second


def test_jobs_are_sorted_by_their_address(browser: Browser) -> None:
    register(browser, "slow", epochs=50)
    register(browser, "quick", epochs=1)
    register(browser, "middle", epochs=9)

    def names(path: str) -> list[str]:
        return re.findall(r'<a href="/jobs/job-[^"]+">(\w+)</a>', browser.page(path))

    assert names("/") == ["middle", "quick", "slow"]
    assert names("/?order=time") == names("/?order=cost") == ["quick", "middle", "slow"]
    assert names("/?order=name&search=l") == ["middle", "slow"]
    assert names("/?order=nonsense") == names("/")


def test_the_cost_of_profiling_stands_beside_the_plan(browser: Browser) -> None:
    job_id = register(browser)
    before = browser.page(f"/jobs/{job_id}")
    assert "profiling has used" not in before
    assert re.search(r"2 launches remaining: about [^,]*, [^,]* of GPU time, \$[\d.]+, including start-up", before)
    assert re.search(r"Including launches that the search may add: at most 8 launches, [^,]*, \$[\d.]+\.", before)
    claimed = browser("POST", wire.routes.JOB_CLAIM.format(job_id=job_id), json={"holder": "h"}).json()["run"]
    running = {"state": "running", "holder": "h"}
    assert browser("PATCH", wire.routes.RUN.format(run_id=claimed["id"]), json=running).is_success
    assert re.search(r"profiling has used [^;]* of GPU time and \$[\d.e-]+\.</p>", browser.page(f"/jobs/{job_id}"))
    assert f"tula logs {claimed['id']}" in browser.page(f"/runs/{claimed['id']}")


def test_a_jobs_page_shows_recommendation_plan_and_candidates(browser: Browser) -> None:
    job_id = register(browser)
    page = browser.page(f"/jobs/{job_id}")
    found = browser("GET", wire.routes.JOB_RECOMMENDATION.format(job_id=job_id)).json()
    assert "`TulaOptimizer`" in found["why"]
    assert re.sub("`([^`]*)`", r"<code>\1</code>", found["why"]) in page
    for run in browser("GET", wire.routes.JOB.format(job_id=job_id)).json()["plan"]:
        assert f"/runs/{run['id']}" in page
        assert f"(local {run['configuration']['local_batch_size']})" in page
    assert "from hardware data, before any measurement" in page
    assert "per million" not in page
    tokens = browser.page(f"/jobs/{register(browser, model={'name': 'gpt', 'tokens_per_example': 1024})}")
    assert re.search(
        r"[kMG] per second</dd><dd class=\"interval\">[0-9.]+ [kM] per step, \$[0-9.]+ per million", tokens
    )


def test_energy_stands_on_the_jobs_page_once_a_run_has_reported_it(browser: Browser) -> None:
    job_id = register(browser, objective="time", usd_per_kwh=0.3, gco2_per_kwh=400.0)
    assert "kWh" not in _answer_of(browser, job_id)
    run = browser("POST", wire.routes.JOB_CLAIM.format(job_id=job_id), json={"holder": "h"}).json()["run"]
    steps = list(range(20))
    body = {
        "rank": 0,
        "boot_id": "b",
        "sequence": steps,
        "step": steps,
        "step_time_s": [0.02] * 20,
        "energy_per_step_j": 30.0,
    }
    assert browser("POST", wire.routes.RUN_SAMPLES.format(run_id=run["id"]), json=body).status_code == 202
    answer = _answer_of(browser, job_id)
    assert re.search(r"<dt>Energy</dt><dd>[0-9.]+ [kM]?Wh, \$[0-9.]+, [0-9.]+ k?g CO2</dd>", answer)
    menu = answer.partition("</table>")[0]
    points = browser("GET", wire.routes.JOB_RECOMMENDATION.format(job_id=job_id)).json()["menu"]
    assert len(re.findall(r">[0-9.]+ [kM]?Wh, \$[0-9.]+, [0-9.]+ k?g CO2</td></tr>", menu)) == len(points) > 1


def _answer_of(browser: Browser, job_id: str) -> str:
    return browser.page(f"/jobs/{job_id}").partition('data-live="answer"')[2].partition("</section>")[0]


def test_another_objective_is_a_link_away(browser: Browser) -> None:
    job_id = register(browser)
    assert re.search(r'href="\?objective=cost" aria-current', browser.page(f"/jobs/{job_id}?objective=cost"))
    assert "objective" in browser.page(f"/jobs/{job_id}?objective=fame", status=422)


def test_a_run_links_to_its_job_and_offers_every_chart(browser: Browser) -> None:
    job_id = register(browser)
    run_id = train(browser, job_id)
    page = browser.page(f"/runs/{run_id}")
    assert f"/jobs/{job_id}" in page
    for name in ("step_time", "memory", "gradient", "scale", "loss", "accuracy"):
        assert f'data-chart="/v1/runs/{run_id}/charts/{name}"' in page


def test_a_run_s_page_shows_its_verdict_once_steps_are_measured(browser: Browser) -> None:
    run_id = train(browser, register(browser))
    assert 'class="verdict"' not in browser.page(f"/runs/{run_id}")
    sequence = list(range(20))
    body = {"rank": 0, "boot_id": "b", "sequence": sequence, "step": sequence}
    seen = {"precision": "bfloat16", "compiled": True, "checkpointing": False, "sharded": True}
    body |= {"machine": seen | {"loader_workers": 1, "cores": 8}}
    body |= {"step_time_s": [0.1] * 20, "input_time_s": [0.05] * 20}
    assert browser("POST", wire.routes.RUN_SAMPLES.format(run_id=run_id), json=body).status_code == 202
    page = " ".join(browser.page(f"/runs/{run_id}").split())
    assert "Input-bound</h2>" in page
    assert "Training spends 50 % of a step waiting for data, with num_workers=1." in page
    assert "<dt>Observed</dt><dd>bfloat16, compiled, no checkpointing, sharded, 1 worker</dd>" in page
    assert "give the DataLoader 1 more worker (num_workers=2). It saves 50 % [50, 50] of a step." in page


def test_settings_are_stated_and_a_profiling_run_has_no_empty_charts(browser: Browser) -> None:
    job_id = register(browser)
    run_id = train(browser, job_id, columns=("delta", "scripted_small_batch_size", "loss"))
    page = browser.page(f"/runs/{run_id}")
    assert "Settings: delta" in " ".join(page.split())
    assert "scripted small batch size" in page
    assert f"/v1/runs/{run_id}/charts/delta" not in page
    profiled = browser("GET", wire.routes.JOB_RUNS.format(job_id=job_id) + "?kind=profile").json()["runs"][0]["id"]
    page = browser.page(f"/runs/{profiled}")
    drawn = [
        name for name in ("step_time", "memory", "gradient", "scale", "loss", "accuracy") if f"charts/{name}" in page
    ]
    assert drawn == ["step_time", "memory"]


def test_events_of_a_run_are_on_its_page_and_on_its_jobs(browser: Browser) -> None:
    job_id = register(browser)
    run_id = train(browser, job_id)
    ended = {"state": "failed", "message": "rank 3 vanished"}
    assert browser("PATCH", wire.routes.RUN.format(run_id=run_id), json=ended).status_code == 200
    for path in (f"/runs/{run_id}", f"/jobs/{job_id}"):
        happened = browser.page(path).split('data-live="happened"')[1]
        assert 'class="warns"' in happened
        assert "Run failed: rank 3 vanished" in happened


def test_the_specification_and_the_way_to_archive_stand_on_the_jobs_page(browser: Browser) -> None:
    job_id = register(browser, limits={"deadline_s": 7200})
    page = browser.page(f"/jobs/{job_id}")
    assert "deadline 2 h" in page
    assert "1 to 8 nodes" in page or "1 to 16 nodes" in page
    assert """data-body='{"archived": true}'""" in page
    browser("PATCH", wire.routes.JOB.format(job_id=job_id), json={"archived": True})
    assert "Unarchive" in browser.page(f"/jobs/{job_id}")


def test_memory_of_a_run_is_drawn_from_its_readings_where_no_series_was_sent(browser: Browser) -> None:
    job_id = register(browser)
    run_id = train(browser, job_id, columns=("loss",))
    path = wire.routes.RUN_CHART.format(run_id=run_id, name="memory")
    assert browser("GET", path).json()["usermeta"]["empty"]
    for rank, peak in ((0, 2 * 2**30), (1, 3 * 2**30)):
        reading = {"method": "cuda_allocator", "peak_bytes": peak, "parameter_bytes": 2**30, "capacity_bytes": 2**34}
        body = {
            "rank": rank,
            "boot_id": f"b{rank}",
            "world_size": 2,
            "sequence": [0],
            "step": [0],
            "step_time_s": [0.1],
        }
        answer = browser("POST", wire.routes.RUN_SAMPLES.format(run_id=run_id), json=body | {"memory": reading})
        assert answer.status_code == 202, answer.text
    spec = browser("GET", path).json()
    parts = {(row["rank"], row["part"]): row["value"] for row in spec["datasets"]["ranks"]}
    assert parts["rank 1", "parameters"] == pytest.approx(1)
    assert parts["rank 1", "not attributed"] == pytest.approx(2)
    assert spec["datasets"]["capacity"][0]["value"] == pytest.approx(16)


def test_quality_compares_runs_by_the_best_measure_they_share(browser: Browser) -> None:
    job_id = register(browser)
    assert "Nothing to compare yet" in browser.page(f"/jobs/{job_id}/quality")
    train(browser, job_id, "lbt", ("loss",))
    assert "by loss" in browser.page(f"/jobs/{job_id}/quality")
    train(browser, job_id, "ags", ("loss", "validation_accuracy"))
    page = browser.page(f"/jobs/{job_id}/quality")
    assert "by validation accuracy" in page
    rows = page.split("<tbody>")[1].split("</tbody>")[0]
    assert ">ags<" in rows
    assert ">lbt<" not in rows


def test_the_output_of_a_run_is_text_whatever_it_holds(browser: Browser) -> None:
    run_id = train(browser, register(browser))
    assert "No output was sent" in browser.page(f"/runs/{run_id}")
    hostile = "<script>alert(1)</script></pre>\n\x1b[31mred\x1b[0m \u202egnp\x00 {{ 7 * 7 }}"
    path = wire.routes.RUN.format(run_id=run_id)
    assert browser("PATCH", path, json={"state": "running", "output": hostile}).is_success
    page = browser("GET", f"/runs/{run_id}", headers=HTML).text
    stored = page.split('<pre class="output"')[1].split(">", 1)[1].split("</pre>")[0]
    assert stored == "&lt;script&gt;alert(1)&lt;/script&gt;&lt;/pre&gt;\nred \ufffdgnp\ufffd {{ 7 * 7 }}"
    longer = browser("PATCH", path, json={"state": "running", "output": "x" * 65_537})
    assert (longer.status_code, longer.json()["field"]) == (422, "output")
    assert "output" not in browser("GET", path).json(), "no list of runs carries it"
    marks = ".,:[{=" * 10_000
    assert browser("PATCH", path, json={"state": "running", "output": marks}).is_success
    assert marks in browser.page(f"/runs/{run_id}")


def test_runs_that_fit_as_well_and_validate_worse_at_a_larger_batch_get_a_sentence(browser: Browser) -> None:
    job_id = register(browser)
    path = wire.routes.JOB_RUNS.format(job_id=job_id)

    def trained(batch: int, loss: float, accuracy: float) -> None:
        request = {"kind": "train", "configuration": {"num_nodes": 1, "local_batch_size": batch}, "holder": "launcher"}
        run_id = browser("POST", path, json=request).json()["id"]
        columns = {"loss": [2.0, *[loss] * 9], "validation_accuracy": [0.1, *[accuracy] * 9]}
        chunk = {"boot_id": "b", "sequence": 0, "steps": list(range(10)), "columns": columns}
        assert browser("POST", wire.routes.RUN_TELEMETRY.format(run_id=run_id), json=chunk).status_code == 202
        for state in ("running", "succeeded"):
            changed = {"state": state, "holder": "launcher"}
            assert browser("PATCH", wire.routes.RUN.format(run_id=run_id), json=changed).is_success

    trained(64, 0.1, 0.71)
    trained(256, 0.5, 0.60)  # lacks steps: its loss is high, too
    assert "regularisation" not in browser.page(f"/jobs/{job_id}/quality")
    trained(512, 0.09, 0.66)
    assert "5.0 points lower with the larger batch, which lacks regularisation" in browser.page(
        f"/jobs/{job_id}/quality"
    )


def test_every_metric_that_was_logged_is_drawn_and_compared(browser: Browser) -> None:
    job_id = register(browser)
    run_id = train(browser, job_id, "", ("eval_loss", "tokens_per_s"))
    page = browser.page(f"/runs/{run_id}")
    for name in ("eval_loss", "tokens_per_s"):
        assert f'data-chart="/v1/runs/{run_id}/charts/{name}"' in page
        assert f'href="/jobs/{job_id}/quality?column={name}"' in page
        chart = wire.routes.RUN_CHART.format(run_id=run_id, name=name)
        spec = browser("GET", f"{chart}?trend=10&logarithmic=true").json()
        assert len(spec["datasets"][f"{name}_trend"]) == 10
    missing = browser("GET", wire.routes.RUN_CHART.format(run_id=run_id, name="lr"))
    assert missing.status_code == 404
    assert "eval_loss" in missing.json()["detail"]
    assert "by eval loss" in browser.page(f"/jobs/{job_id}/quality"), "no accuracy, and no loss of training"
    assert "by tokens per s" in browser.page(f"/jobs/{job_id}/quality?column=tokens_per_s&logarithmic=true")
    path = wire.routes.JOB_CHART.format(job_id=job_id, name="quality")
    spec = browser("GET", f"{path}?column=tokens_per_s&logarithmic=true").json()
    assert {row["run"] for row in spec["datasets"]["runs"]} == {run_id}


def test_runs_compared_are_chosen_smoothed_and_drawn_over_epochs_or_steps(browser: Browser) -> None:
    job_id = register(browser)
    one, two, _ = (train(browser, job_id, "", ("loss",)) for _ in range(3))
    page = browser.page(f"/jobs/{job_id}/quality?column=loss&trend=5&over=step&run={one}&run={two}")
    assert page.count('name="run" value="run-') == 3
    assert len(re.findall(r'name="run"[^>]* checked', page)) == 2
    chart = re.search(r'data-chart="([^"]+)"', page)
    assert chart is not None
    spec = browser("GET", chart[1].replace("&amp;", "&")).json()
    assert {row["run"] for row in spec["datasets"]["points"]} == {one, two}
    assert len(spec["datasets"]["points"]) == 2 * 5, "a median of each of 5 stretches"
    assert spec["encoding"]["x"]["field"] == "step"
    every = browser("GET", f"/v1/jobs/{job_id}/charts/quality?column=loss").json()["datasets"]["points"]
    assert len({row["run"] for row in every}) == 3


def test_older_training_runs_are_reached_from_the_jobs_page(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_TRAININGS", 2)
    monkeypatch.setattr(pages, "MAX_COMPARED", 2)
    job_id = register(browser)
    runs = [train(browser, job_id, "", ("loss",)) for _ in range(3)]
    page = browser.page(f"/jobs/{job_id}")
    assert runs[0] not in page.split('id="trainings"')[1].split("</section>")[0]
    older = re.search(r'rel="next" href="([^"#]+)', page)
    assert older is not None
    page = browser.page(f"/jobs/{job_id}{older[1].replace('&amp;', '&')}")
    listed = page.split('id="trainings"')[1].split("</section>")[0]
    assert runs[0] in listed
    assert runs[1] not in listed
    assert "Newest training runs" in listed
    compared = browser.page(f"/jobs/{job_id}/quality")
    older = re.search(r'rel="next" href="([^"]+)', compared)
    assert older is not None
    assert runs[0] not in compared
    assert runs[0] in browser.page(f"/jobs/{job_id}/quality{older[1].replace('&amp;', '&')}")


def test_a_job_is_registered_from_the_text_of_a_job_toml(browser: Browser) -> None:
    form = re.search(r"<textarea[^>]*>\n(.*)</textarea>", browser.page("/jobs/new"), re.DOTALL)
    assert form is not None
    text = form[1]
    made = browser("POST", "/jobs/new", content=text)
    assert made.status_code == 201, made.text
    assert ">resnet50</h1>" in browser.page(f"/jobs/{made.json()['id']}")
    assert browser("POST", "/jobs/new", content=text).json() == made.json()
    wrong = text.replace("max_nodes", "max_node").replace("epochs = 90", "epochs = -1")
    refused = browser("POST", "/jobs/new", content=wrong)
    assert refused.status_code == 422
    named = {each["field"]: each["message"] for each in refused.json()["errors"]}
    assert {"epochs", "cluster.0.max_node", "cluster.0.max_nodes"} == set(named)
    assert "check its spelling" in named["cluster.0.max_node"]
    broken = text.replace("epochs = 90", "epochs 90")
    for content in (broken, "a = " + "[" * 1900, "n = " + "9" * 5000, b"\xff"):
        refused = browser("POST", "/jobs/new", content=content)
        assert refused.status_code == 422, refused.text
        assert "not valid TOML" in refused.json()["detail"]
    assert "line 2" in browser("POST", "/jobs/new", content=broken).json()["detail"]


def test_only_a_users_token_registers_and_changes_jobs_from_pages(browser: Browser) -> None:
    browser.cookies.set(COOKIE, token(browser, "admin"))
    content = 'name = "a"\nmodel = { name = "m" }\ndataset = { size = 9000 }\ncluster = { max_nodes = 2 }\n'
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil"}, {}):
        assert browser("POST", "/jobs/new", content=content, headers=headers).status_code == 401
    same = {"Sec-Fetch-Site": "same-origin"}
    made = browser("POST", "/jobs/new", content=content, headers=same)
    assert made.status_code == 201, made.text
    page = f"/jobs/{made.json()['id']}"
    assert "data-edit" in browser.page(page)
    assert "data-patch" in browser.page(page)
    browser.cookies.set(COOKIE, token(browser, "read"))
    assert browser("POST", "/jobs/new", content=content, headers=same).status_code == 403
    assert "data-edit" not in browser.page(page)
    assert "data-patch" not in browser.page(page)
    assert "/jobs/new" not in browser.page("/")


def test_the_form_of_a_job_has_every_limit_and_price(browser: Browser) -> None:
    """Saving replaces all limits and prices, so a field that the form lacks would be lost."""
    kinds = [{"instance_type": name, "max_nodes": 2, "price": {"usd_per_node_hour": 2}} for name in ("p3.2xlarge", "b")]
    kinds[1]["price"] |= {"spot": {"usd_per_node_hour": 0.5, "interruptions_per_node_hour": 0.1}}
    job_id = register(browser, cluster=kinds, limits={"deadline_s": 7200})
    fields = re.findall(r'<(?:input|select) name="(\[.*?\])"[ >]', browser.page(f"/jobs/{job_id}"))
    paths = {tuple(json.loads(each)) for each in fields}
    price = {(name,) for name in wire.Price.model_fields if name != "spot"}
    price |= {("spot", name) for name in wire.SpotPrice.model_fields}
    wanted = {("limits", name) for name in wire.Limits.model_fields} | {("objective",), ("usd_per_hour_of_waiting",)}
    assert paths == wanted | {("prices", kind["instance_type"], *path) for kind in kinds for path in price}
    page = browser.page(f"/jobs/{job_id}")
    assert re.search(r'deadline_s"\]" inputmode="decimal" autocomplete="off" value="2" data-times="3600"', page)
    assert re.search(r'"b", "spot", "restart_s"\]"[^>]* value="300"', page)


def test_the_what_if_form_takes_typed_lists_and_compares_with_the_recommendation(browser: Browser) -> None:
    job_id = register(browser)
    path = f"/jobs/{job_id}/what-if"
    table = browser.page(f"{path}?nodes=1,+2&global_batch=256&usd_per_node_hour=&deadline_hours=")
    rows = table.split("<tbody>")[1].count("<tr")
    assert rows == 2
    assert "Time compared" in table
    assert "<html" not in table
    best = browser("GET", wire.routes.JOB_RECOMMENDATION.format(job_id=job_id)).json()["chosen"]
    same = f"?nodes={best['configuration']['num_nodes']}&global_batch={best['global_batch_size']}"
    assert ">same</td>" in browser.page(path + same)
    assert "Excluded: " in browser.page(f"{path}?nodes=2&global_batch=256&deadline_hours=0.001")
    assert "slower or excluded candidates are not shown" in browser.page(path)
    for wrong in ("nodes=two", "nodes=0", "usd_per_node_hour=-1", "deadline_hours=nan"):
        answer = browser("GET", f"{path}?{wrong}")
        assert answer.status_code == 422
        assert wrong.split("=")[0] in answer.json()["detail"]


def test_what_if_asks_about_one_instance_type_accumulation_and_price(browser: Browser) -> None:
    price = {"usd_per_node_hour": 3.0, "spot": {"usd_per_node_hour": 1.0, "interruptions_per_node_hour": 0.1}}
    kinds = [{"instance_type": name, "max_nodes": 4, "price": price} for name in ("a", "b")]
    job_id = register(browser, cluster=kinds, batch={"max_local_batch_size": 128, "max_grad_accum_steps": 4})
    page = browser.page(f"/jobs/{job_id}")
    for field in ("instance_type", "micro_steps", "spot"):
        assert f'name="{field}"' in page
    spec = browser("GET", wire.routes.JOB_CHART.format(job_id=job_id, name="frontier")).json()
    row = next(each for each in spec["datasets"]["candidates"] if each["asks"][3] > 1 and each["asks"][4])
    nodes, batch, kind, steps, *_ = row["asks"]
    path = f"/jobs/{job_id}/what-if?nodes={nodes}&global_batch={batch}"
    cells = r'<tr class="[^"]*"><td class="whole">([^<]*)'
    one = re.findall(cells, browser.page(f"{path}&instance_type={kind}&micro_steps={steps}&spot=true"))
    assert one == [f"{row['configuration']}, spot"]
    every = re.findall(cells, browser.page(path))
    assert one[0] in every
    assert len(every) > 3
    assert browser("GET", f"/jobs/{job_id}/what-if?instance_type=c").status_code == 422


def test_a_job_with_options_shows_todays_choice_and_asks_what_if_by_value(browser: Browser) -> None:
    job_id = register(browser, options={"precision": ["fp32", "bf16"], "compile": ["off", "on"]})
    page = browser.page(f"/jobs/{job_id}")
    for text in (
        "With your current options: ",
        "precision: fp32, bf16; currently fp32",
        "Effects of options",
        "not compiled",
    ):
        assert text in page
    what_if = browser.page(f"/jobs/{job_id}/what-if?nodes=2&option=precision%3Dbf16&option=compile%3Don")
    rows = re.findall(r'<tr class="[^"]*"><td class="whole">([^<]*)', what_if)
    assert rows
    assert all(row.endswith("compiled, bf16") for row in rows)
    assert "no value 'fp8'" in browser("GET", f"/jobs/{job_id}/what-if?option=precision%3Dfp8").json()["detail"]
    asks = browser("GET", wire.routes.JOB_CHART.format(job_id=job_id, name="frontier")).json()["datasets"]["candidates"]
    assert {tuple(row["asks"][5]) for row in asks} <= {
        (f"compile={compiled}", f"precision={precision}")
        for compiled in ("off", "on")
        for precision in ("fp32", "bf16")
    }
    without = browser.page(f"/jobs/{register(browser, 'plain')}")
    assert "Effects of options" not in without
    assert "today" not in without


def test_markup_in_a_name_is_text(browser: Browser) -> None:
    job_id = register(browser, "<script>alert(1)</script>")
    for path in ("/", f"/jobs/{job_id}"):
        raw = browser("GET", path, headers=HTML).text
        assert "<script>alert" not in raw
        assert "&lt;script&gt;alert" in raw


def test_every_chart_route_answers_a_specification(browser: Browser) -> None:
    job_id = register(browser)
    run_id = train(browser, job_id, columns=("grad_norm", "gradient_variability"))
    for name in ("frontier", "tradeoff", "memory", "step_breakdown", "options", "accuracy", "quality"):
        spec = browser("GET", wire.routes.JOB_CHART.format(job_id=job_id, name=name)).json()
        assert "vega-lite" in spec["$schema"]
    spec = browser("GET", wire.routes.RUN_CHART.format(run_id=run_id, name="gradient") + "?first_step=10&last_step=14")
    assert [row["step"] for row in spec.json()["datasets"]["grad_norm"]] == [10, 11, 12, 13, 14]


def test_an_unknown_chart_is_answered_with_the_known_ones(browser: Browser) -> None:
    answer = browser("GET", wire.routes.JOB_CHART.format(job_id=register(browser), name="pie"))
    assert answer.status_code == 404
    assert "tradeoff" in answer.json()["detail"]


def test_a_missing_job_is_a_page_for_people_and_a_problem_for_programs(browser: Browser) -> None:
    page = browser.page("/jobs/none", status=404)
    assert "There is no job 'none'" in page
    assert "Back to all jobs" in page
    assert browser("GET", "/v1/jobs/none").headers["content-type"] == "application/problem+json"


def test_once_a_token_exists_pages_lead_to_sign_in_and_back(browser: Browser) -> None:
    secret = token(browser, "admin")
    away = browser("GET", "/?search=a%20b", headers=HTML)
    assert away.status_code == 303
    assert away.headers["location"] == "/login?next=%2F%3Fsearch%3Da%2520b"
    done = browser("POST", "/login", data={"token": secret, "next": "/?search=a%20b"})
    assert (done.status_code, done.headers["location"]) == (303, "/?search=a%20b")
    cookie = done.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    session = done.cookies[COOKIE]
    assert secret not in cookie, "the token itself stays out of the browser's store"
    browser.cookies.set(COOKIE, session)
    assert "Sign out admin" in browser.page("/")
    assert "Max-Age=0" in browser("POST", "/logout").headers["set-cookie"]
    browser.cookies.set(COOKIE, session)
    assert browser("GET", "/", headers=HTML).status_code == 303, "a cookie that was kept opens nothing after sign-out"
    assert browser("GET", wire.routes.JOBS).status_code == 401
    assert browser("GET", wire.routes.JOBS, headers={"Authorization": f"Bearer {session}"}).status_code == 401
    assert browser("GET", wire.routes.JOBS, headers={"Authorization": f"Bearer {secret}"}).status_code == 200


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}])
def test_another_site_cannot_sign_a_reader_in(browser: Browser, headers: dict[str, str]) -> None:
    """Otherwise a user would work in someone else's account without knowing it."""
    answer = browser("POST", "/login", data={"token": token(browser, "admin")}, headers=headers)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("given", ["", "tula_wrong", "é", "x" * 600])
def test_a_wrong_token_is_refused_in_a_sentence(browser: Browser, given: str) -> None:
    token(browser, "admin")
    answer = browser("POST", "/login", data={"token": given})
    assert answer.status_code == 401
    assert 'role="alert"' in answer.text
    assert "set-cookie" not in answer.headers


def test_an_agents_token_opens_no_page(browser: Browser) -> None:
    secret = token(browser, "agent", job_id=register(browser))
    assert "cannot sign in" in browser("POST", "/login", data={"token": secret}).text


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "\\\\evil", "/a\r\nb"])
def test_sign_in_never_leads_to_another_host(browser: Browser, target: str) -> None:
    secret = token(browser, "admin")
    assert browser("POST", "/login", data={"token": secret, "next": target}).headers["location"] == "/"


def test_a_cookie_does_not_write_for_another_site(browser: Browser) -> None:
    """To prevent cross-site request forgery, the cookie permits writes only from this service's own pages."""
    browser.cookies.set(COOKIE, token(browser, "admin"))
    body = {"name": "mine"}
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://evil"}, {}):
        assert browser("POST", wire.routes.PROJECTS, json=body, headers=headers).status_code == 401
    ours = browser("POST", wire.routes.PROJECTS, json=body, headers={"Sec-Fetch-Site": "same-origin"})
    assert ours.status_code == 201
    by_origin = browser("POST", wire.routes.PROJECTS, json={"name": "b"}, headers={"Origin": "http://localhost"})
    assert by_origin.status_code == 201


def test_a_script_that_is_signed_out_gets_no_password_box(browser: Browser) -> None:
    token(browser, "admin")
    asked = browser("GET", wire.routes.JOBS, headers={"Sec-Fetch-Dest": "empty"})
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"] == 'Bearer realm="tula"'  # a browser asks for a password of Basic only


def follow(browser: Browser, job_id: str, **headers: str) -> None:
    """Train with the recommended configuration, with step times 10 % longer than predicted."""
    path = wire.routes.JOB_RECOMMENDATION.format(job_id=job_id)
    best = wire.read(wire.Recommendation, browser("GET", path).text).chosen
    assert best is not None
    body = {"kind": "train", "configuration": best.configuration.as_json(), "holder": "h"}
    run_id = browser("POST", wire.routes.JOB_RUNS.format(job_id=job_id), json=body, headers=headers).json()["id"]
    samples = {"rank": 0, "boot_id": "b", "world_size": best.configuration.world_size}
    samples |= {"sequence": [*range(20)], "step": [*range(20)], "step_time_s": [1.1 * best.step_time_s.value] * 20}
    for method, route, sent in (
        ("PATCH", wire.routes.RUN, {"state": "running", "holder": "h"}),
        ("POST", wire.routes.RUN_SAMPLES, samples),
        ("PATCH", wire.routes.RUN, {"state": "succeeded", "holder": "h"}),
    ):
        assert browser(method, route.format(run_id=run_id), json=sent, headers=headers).is_success


def test_accuracy_over_all_jobs_is_that_of_runs_which_followed_a_recommendation(browser: Browser) -> None:
    assert "Nothing measured yet" in browser.page("/accuracy")
    job_id = register(browser)
    follow(browser, job_id)
    register(browser, "recommended-only", epochs=3)
    page = browser.page("/accuracy")
    assert re.search(r"<td>resnet50</td><td>not named</td><td class=\"n\">1</td><td class=\"n\">1</td>", page)
    assert 'class="n fair">+10.0 %' in page
    assert ">recommended-only<" not in page
    ledger = browser.page(f"/jobs/{job_id}").split('data-live="ledger"')[1]
    assert ledger.split("</section>")[0].count("/runs/") == 1
    for name in ("accuracy", "calibration"):
        assert "1 run" in browser("GET", f"/accuracy/charts/{name}").json()["title"]["subtitle"]
    assert browser("GET", "/accuracy/charts/pie").status_code == 404


def test_projects_are_kept_apart_on_pages_and_charts(browser: Browser) -> None:
    browser.cookies.set(COOKIE, token(browser, "admin"))
    same = {"Sec-Fetch-Site": "same-origin"}
    for name in ("red", "blue"):
        assert browser("POST", wire.routes.PROJECTS, json={"name": name}, headers=same).status_code == 201
    secrets = {name: token(browser, "user", project=name) for name in ("red", "blue")}
    browser.cookies.set(COOKIE, secrets["red"])
    spec = models.job().spec.model_dump(mode="json")
    job_id = browser("POST", wire.routes.JOBS, json=spec, headers=same).json()["job"]["id"]
    assert "resnet50-cifar" in browser.page("/")
    follow(browser, job_id, **same)
    assert "resnet50-cifar" in browser.page("/accuracy")
    browser.cookies.set(COOKIE, secrets["blue"])
    assert "No job yet" in browser.page("/")
    assert "Nothing measured yet" in browser.page("/accuracy")
    assert browser.page(f"/jobs/{job_id}", status=404)
    assert browser.page(f"/jobs/{job_id}/quality", status=404)
    assert browser.page(f"/jobs/{job_id}/what-if", status=404)
    assert browser("GET", wire.routes.JOB_CHART.format(job_id=job_id, name="memory")).status_code == 404
    admin = browser.page("/admin")
    assert ">blue<" in admin
    assert ">red<" not in admin


def test_static_files_come_from_a_fixed_list_and_are_revalidated(browser: Browser) -> None:
    style = browser("GET", "/static/app.css")
    assert style.headers["content-type"] == "text/css; charset=utf-8"
    again = browser("GET", "/static/app.css", headers={"If-None-Match": style.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("..%2fpages.py", "%2e%2e%2fpages.py", "pages.py", "..%5c..%5capp.py"):
        assert browser("GET", f"/static/{path}").status_code == 404


def test_no_page_refers_to_another_host_or_holds_inline_script(browser: Browser) -> None:
    job_id = register(browser)
    run_id = train(browser, job_id)
    paths = ("/", "/jobs/new", f"/jobs/{job_id}", f"/jobs/{job_id}/quality", f"/runs/{run_id}", "/admin", "/login")
    for path in (*paths, "/jobs/no"):
        answer = browser("GET", path, headers=HTML)
        assert not re.search(r'(?:src|href|action)="(?:https?:)?//', answer.text), path
        assert not re.search(r"<script(?![^>]*\bsrc=)", answer.text), path
        assert not re.search(r"\son[a-z]+=", answer.text), path
        policy = answer.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe-eval" not in policy


def test_a_service_that_only_reads_shows_accuracy_to_anyone_and_changes_nothing(
    browser: Browser, sqlite_url: str
) -> None:
    job_id = register(browser, "secret-name")
    run_id = train(browser, job_id)
    with browser.app.state.services.store.transaction() as tx:
        values = {"objective": "time", "basis": "profiled", "configuration": tx.runs.get(run_id).configuration}
        values |= {"created_at": tx.now(), "prices": {}, "model_version": "1", "data_version": 1}
        step_time = wire.Estimate(value=0.5, low=0.4, high=0.6)
        record = LedgerRecord(job_id=job_id, **values, predicted_step_time_s=step_time)
        tx.ledger.append(record)
        tx.ledger.record_outcome(record.recommendation_id, run_id, 0.55, error=0.1, within_interval=True)
    assert "secret-name" in browser.page("/accuracy")
    secret = token(browser, "admin")
    app = create_app(Settings(database=sqlite_url, read_only=True))
    public = Browser(app)
    try:
        page = public.page("/accuracy")
        assert "10.0 %" in page or "10 %" in page
        assert "Sign in" in page
        drawn = [public("GET", f"/accuracy/charts/{name}") for name in ("accuracy", "calibration")]
        assert [each.status_code for each in drawn] == [200, 200]
        for hidden in ("secret-name", job_id, run_id, "/admin", ">API<", ">Newest<"):
            assert hidden not in "".join((page, *(each.text for each in drawn)))
        for path in ("/", f"/jobs/{job_id}", wire.routes.JOBS, wire.routes.TOKENS, "/metrics", "/admin"):
            assert public("GET", path).status_code == 401, path
        bearer = {"Authorization": f"Bearer {secret}"}
        assert public("GET", wire.routes.JOBS, headers=bearer).status_code == 200
        answer = public("DELETE", wire.routes.JOB.format(job_id=job_id), headers=bearer)
        assert answer.status_code == 403
        assert "--read-only" in answer.json()["detail"]
        assert public("POST", wire.routes.JOBS, json={}, headers=bearer).status_code == 403
    finally:
        public.loop.close()
        app.state.services.store.close()
