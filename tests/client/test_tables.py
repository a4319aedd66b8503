"""Tests the tables in a terminal: a run stays on one line if the terminal has a usual width."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
import typer
from rich.console import Console

import tula_wire as wire
from tests.service.dashboard import models
from tula_client.cli import jobs, launch, output
from tula_client.launch.tune import Tuned
from tula_wire import format


def test_a_run_takes_one_line_of_a_hundred_columns() -> None:
    out = StringIO()
    purpose = "Design: middle cluster with smallest batch, most informative for the model."
    runs = [
        models.run("run-8f004699939b2956", kind="profile", purpose=purpose),
        models.run("run-9", method="post_local_sgd"),
    ]
    Console(file=out, width=100).print(jobs.job_view(models.job(), runs))
    lines = out.getvalue().splitlines()
    for run in runs:
        line = next(line for line in lines if run.id in line)
        for text in (run.state, "2, 128 (64)", "210 ms", "+5.0 %"):
            assert text in line
    assert output.BRIEF in out.getvalue()
    assert "post_local_sgd" in next(line for line in lines if "run-9" in line)
    assert f"{runs[0].id}  {purpose}" in lines


def test_failed_profiling_runs_are_counted_apart() -> None:
    plan = [models.run("run-1", kind="profile", state=state) for state in ("succeeded", "failed", "out_of_memory")]
    job = models.job().model_copy(update={"plan": plan, "runs_done": 3, "runs_planned": 4})
    out = StringIO()
    Console(file=out, width=100).print(jobs.job_view(job, []))
    assert "3 of 4 profiling runs done, 2 of them failed" in out.getvalue()
    out = StringIO()
    Console(file=out, width=100).print(jobs.job_view(job.model_copy(update={"plan": plan[:1]}), []))
    assert "profiling runs done\n" in out.getvalue().replace(" \n", "\n")


def test_a_brief_configuration_says_what_sets_it_apart() -> None:
    plain = wire.Configuration(num_nodes=8, local_batch_size=32)
    typed = wire.Configuration(
        num_nodes=4, ranks_per_node=4, local_batch_size=64, grad_accum_steps=2, instance_type="g5.12xlarge"
    )
    assert output.brief(plain) == "8, 256 (32)"
    assert output.brief(typed) == "4 g5.12xlarge x 4 ranks, 2048 (64 x 2)"
    assert output.brief(None) == "-"


def test_candidates_on_several_instance_types_say_which() -> None:
    answer = models.recommendation()
    (one, *others) = answer.candidates
    typed = one.model_copy(update={"configuration": replace(one.configuration, instance_type="g5.12xl")})
    for candidates, heading in (([one, typed], True), ([one, *others], False), ([typed, typed], False)):
        out = StringIO()
        printed = answer.model_copy(update={"candidates": candidates})
        Console(file=out, width=160).print(jobs.candidates_table(printed))
        lines = out.getvalue().splitlines()
        assert (lines[0].split()[0] == "type") is heading
        assert [line.split()[0] for line in lines[1:3]] == ["default", "g5.12xl"] or not heading


def test_a_recommendation_of_a_language_model_counts_tokens() -> None:
    answer = models.recommendation()
    assert answer.chosen is not None
    tokens = {
        "tokens_per_step": 524_288.0,
        "tokens_per_s": wire.Estimate(value=1.25e6, low=1.2e6, high=1.3e6),
        "usd_per_million_tokens": wire.Estimate(value=0.125, low=0.1, high=0.15),
    }
    out = StringIO()
    printed = answer.model_copy(update={"chosen": answer.chosen.model_copy(update=tokens)})
    Console(file=out, width=100).print(jobs.recommendation_view(printed))
    for text in ("524 k a step", "1.25 M (1.2 M to 1.3 M) a second", "$0.125 ($0.1 to $0.15) a million"):
        assert text in out.getvalue()


def test_a_configuration_inside_an_answer_is_printed_as_a_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit(
        {"attempts": [{"configuration": wire.Configuration(num_nodes=2, local_batch_size=8)}]}, "", as_json=True
    )
    (attempt,) = json.loads(capsys.readouterr().out)["attempts"]
    assert (attempt["configuration"]["num_nodes"], attempt["configuration"]["local_batch_size"]) == (2, 8)


@pytest.mark.parametrize("width", [160, 100, 80])
def test_a_table_of_candidates_cuts_no_number_and_marks_the_recommended_one(width: int) -> None:
    answer = models.recommendation()
    assert answer.chosen is not None
    cost = wire.Estimate(value=392.25, low=300.0, high=500.0)
    wide = [one.model_copy(update={"cost_usd": cost}) for one in answer.candidates]
    out = StringIO()
    Console(file=out, width=width).print(jobs.candidates_table(answer.model_copy(update={"candidates": wide})))
    text = out.getvalue()
    for one in wide:
        assert output.estimate(one.step_time_s) in text
    assert text.count("$392") == len(wide)
    assert sum(line.lstrip().startswith("* ") for line in text.splitlines()) == 1
    left_out = [name for name in ("ranks", "epoch", "memory") if name not in text.splitlines()[0]]
    assert left_out == [] if width == 160 else all(name in text.partition("too narrow for")[2] for name in left_out)


def test_a_list_of_runs_keeps_ids_and_times_whole_at_eighty_columns() -> None:
    runs = [models.run("run-8f004699939b2956", kind="profile"), models.run("run-9", method="post_local_sgd")]
    out = StringIO()
    Console(file=out, width=80).print(jobs.job_view(models.job(), runs))
    for run in runs:
        line = next(line for line in out.getvalue().splitlines() if run.id in line)
        assert all(text in line for text in (run.id, run.state, "2, 128 (64)", "210 ms"))


def test_a_recommendation_begins_with_the_points_to_choose_among() -> None:
    answer = models.recommendation()
    assert answer.chosen is not None
    menu = [
        wire.MenuPoint(
            configuration=one.configuration,
            global_batch_size=one.global_batch_size,
            total_time_s=one.total_time_s,
            cost_usd=one.cost_usd,
            usd_per_hour_saved=saved,
            recommended=one == answer.chosen,
        )
        for one, saved in ((answer.chosen, 12.5), (answer.candidates[-1], None))
    ]
    out = StringIO()
    Console(file=out, width=160).print(jobs.recommendation_view(answer.model_copy(update={"menu": menu})))
    lines = out.getvalue().splitlines()
    assert lines[0].split("  ")[0] == "to choose among"
    assert lines[1].startswith("* ")
    assert "$12.5" in lines[1]
    assert not lines[2].startswith("* ")
    assert any(line.startswith("Recommended: ") for line in lines[3:])


def test_energy_its_price_and_its_co2_stand_in_a_recommendation_that_has_them_only() -> None:
    answer = models.recommendation()
    assert answer.chosen is not None
    energy = {
        name: wire.Estimate(value=value, low=0.9 * value, high=1.1 * value)
        for name, value in (("energy_kwh", 12.0), ("energy_usd", 3.6), ("energy_gco2", 4800.0))
    }
    chosen = answer.chosen
    menu = [
        wire.MenuPoint(
            configuration=one.configuration, global_batch_size=one.global_batch_size, total_time_s=one.total_time_s
        )
        for one in (chosen, answer.candidates[-1])
    ]

    def printed(**more: object) -> str:
        out = StringIO()
        update = {
            "chosen": chosen.model_copy(update=more),
            "menu": [point.model_copy(update=more) for point in menu],
        }
        Console(file=out, width=160).print(jobs.recommendation_view(answer.model_copy(update=update)))
        return out.getvalue()

    priced, alone = printed(**energy), printed(energy_kwh=energy["energy_kwh"])
    assert re.findall("energy|its price|its CO2", priced.splitlines()[0]) == ["energy", "its price", "its CO2"]
    assert re.search(r"12 kWh +\$3\.60 +4\.8 kg *$", priced.splitlines()[1])
    for text in ("12 kWh (10.8 kWh to 13.2 kWh)", "$3.60 ($3.24 to $3.96)", "4.8 kg (4.32 kg to 5.28 kg)"):
        assert text in priced
    assert "12 kWh (10.8 kWh to 13.2 kWh)" in alone
    assert not re.search("its price|CO2", alone)
    assert not re.search("energy|kWh|CO2", printed())


@pytest.mark.parametrize(("typed", "usd"), [("", None), ("  ", None), ("25", 25.0), ("$7.50", 7.5)])
def test_an_hour_of_waiting_is_an_amount_or_nothing(typed: str, usd: float | None) -> None:
    assert launch.usd_typed(typed) == usd


@pytest.mark.parametrize("typed", ["much", "-3", "0", "inf", "nan"])
def test_what_is_no_amount_is_asked_again(typed: str) -> None:
    with pytest.raises(typer.BadParameter, match="not an amount above 0"):
        launch.usd_typed(typed)


def test_tune_asks_only_where_the_answer_may_change_the_recommendation() -> None:
    answer = models.recommendation().model_copy(update={"objective": "balanced"})
    points = [
        wire.MenuPoint(
            configuration=one.configuration,
            global_batch_size=one.global_batch_size,
            total_time_s=one.total_time_s,
            cost_usd=wire.Estimate(value=1, low=1, high=1),
        )
        for one in answer.candidates[:2]
    ]
    job = models.job()
    told = job.model_copy(update={"spec": job.spec.model_copy(update={"usd_per_hour_of_waiting": 5.0})})
    unpriced = [point.model_copy(update={"cost_usd": None}) for point in points]
    several = answer.model_copy(update={"menu": points})
    assert launch.may_ask(Tuned(job, several, ()), then_run=False)
    assert not launch.may_ask(Tuned(job, several, ()), then_run=True)  # nobody may be there, and the training waits
    for other, changed in (
        (told, several),
        (job, answer.model_copy(update={"menu": points[:1]})),
        (job, answer.model_copy(update={"menu": unpriced})),
        (job, several.model_copy(update={"objective": "time"})),
    ):
        assert not launch.may_ask(Tuned(other, changed, ()), then_run=False)


def test_a_recommendation_with_options_says_what_they_are_worth_and_what_today_costs() -> None:
    answer = models.recommendation()
    assert answer.chosen is not None
    base, best = ((("compile", "off"), ("precision", "fp32")), (("compile", "on"), ("precision", "bf16")))
    effect = {"option": "precision", "value": "bf16", "base": "fp32", "launched": True, "recommended": True}
    sentence = "bf16 saves 48 % [44, 52] of the time."
    chosen, today = (
        one.model_copy(update={"configuration": replace(one.configuration, options=options)})
        for one, options in ((answer.chosen, best), (answer.candidates[0], base))
    )
    update = {
        "chosen": chosen,
        "with_base_options": today,
        "candidates": [chosen, today],
        "options": [wire.OptionEffect.model_validate({**effect, "sentence": sentence})],
    }
    out = StringIO()
    Console(file=out, width=200).print(jobs.recommendation_view(answer.model_copy(update=update), candidates=True))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[0].split("  ")[0].startswith("nodes")
    assert "options" in lines[0]
    assert "compiled, bf16" in lines[1]
    assert "not compiled, fp32" in lines[2]
    assert sentence in lines
    time, cost = format.duration(chosen.total_time_s.value), format.money(chosen.cost_usd.value)
    before = f"{format.duration(today.total_time_s.value)}, {format.money(today.cost_usd.value)}"
    nodes = f"{chosen.configuration.num_nodes} nodes, global batch {chosen.global_batch_size}"
    assert f"{nodes}, compiled, bf16: {time}, {cost}; as you run it today: {before}." in lines
    (same,) = jobs.today_line(answer.model_copy(update=update | {"with_base_options": chosen}))
    assert same.plain == f"{nodes}, compiled, bf16: {time}, {cost}."


def test_the_run_most_like_the_recommendation_has_its_options_before_its_nodes_and_its_batch() -> None:
    def run(name: str, nodes: int, local: int, **options: str) -> wire.Run:
        configuration = wire.Configuration(
            num_nodes=nodes, local_batch_size=local, options=tuple(sorted(options.items()))
        )
        return models.run(name).model_copy(update={"configuration": configuration})

    answer = models.recommendation()
    best = run("best", 8, 128, compile="on", precision="bf16").configuration
    chosen = answer.candidates[0].model_copy(update={"configuration": best})
    answer = answer.model_copy(update={"chosen": chosen})
    plan = [
        run("half", 8, 128, compile="off", precision="bf16"),
        run("far", 1, 32, compile="on", precision="bf16"),
        run("near", 4, 32, compile="on", precision="bf16"),
        run("base", 8, 128, compile="off", precision="fp32"),
    ]
    order = []
    while (like := launch.run_like(answer, plan)) is not None:
        order.append(like.id)
        plan = [one for one in plan if one.id != like.id]
    assert order == ["near", "far", "half", "base"]


def test_a_job_without_options_shows_none() -> None:
    out = StringIO()
    answer = models.recommendation().model_copy(update={"options": []})
    Console(file=out, width=200).print(jobs.recommendation_view(answer, candidates=True))
    assert "options" not in out.getvalue()
    assert "today" not in out.getvalue()
    assert output.brief(wire.Configuration(num_nodes=8, local_batch_size=32, options=(("zero", "2"),))) == (
        "8, 256 (32), zero 2"
    )
