"""Tests `tula tune`: concurrent runs within the node budget, and continuation after every kind of failure."""
# ruff: noqa: ARG001 (fakes take what the real ones take)

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import pytest

from tests.client.launch.fakes import TEMPLATE, Bench, FakeProcess, FakeService, Notes, configuration
from tula_client import ServiceUnreachableError, _calls
from tula_client._errors import LaunchError, UsageError
from tula_client._request import Answer
from tula_client.launch.run_loop import LEASE_S, RETRY_S
from tula_client.launch.template import Template
from tula_client.launch.tune import cost_of_explaining, to_explain, to_measure_again, work_through
from tula_wire import ClaimRequest, Price

THREE = [configuration(4, 32), configuration(2, 64), configuration(1, 128)]


def measured(service):
    """Return a function that simulates commands that send samples and succeed."""

    def fate(command, environment, log):
        run = environment["TULA_RUN_ID"]
        return FakeProcess(during=lambda: service.change(run, num_samples=9))

    return fate


def tune(bench, service, **options):
    with bench.runner:
        return work_through(bench.runner, service.job("job-1"), TEMPLATE, **options)


def test_every_run_of_the_plan_is_measured_with_its_own_numbers(tmp_path):
    service, notes = FakeService(THREE), Notes()
    bench = Bench(tmp_path, service, measured(service), notes)
    tuned = tune(bench, service)
    assert [run.state for run in tuned.job.plan] == ["succeeded"] * 3
    assert [command for command, _, _ in bench.started] == [
        ["launch", "4", "32", "1"],
        ["launch", "2", "64", "1"],
        ["launch", "1", "128", "1"],
    ]
    environment = bench.started[1][1]
    assert environment["TULA_URL"] == "http://x"
    assert (environment["TULA_WARMUP_STEPS"], environment["TULA_MEASURE_STEPS"]) == ("1", "5")
    assert environment["TULA_KIND"] == "profile"
    assert environment["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("words", "inherited", "threads"),
    [
        (("torchrun", "--nproc-per-node={world_size}", "train.py"), {}, "1"),
        (("/opt/bin/torchrun", "--nproc-per-node={world_size}", "train.py"), {}, "1"),
        (("python", "-m", "torch.distributed.run", "--nproc-per-node={world_size}", "train.py"), {}, "1"),
        (("bash", "-c", "exec torchrun --nproc-per-node={world_size} train.py"), {}, "1"),
        (("torchrun", "--nproc-per-node={world_size}", "train.py"), {"OMP_NUM_THREADS": "4"}, "4"),
        (("srun", "--ntasks={world_size}", "train.py"), {}, None),
        (("mpirun", "-np", "{world_size}", "train.py", "--data=/torchrun-data"), {}, None),
    ],
)
def test_a_run_of_one_rank_under_torchrun_has_as_many_threads_a_rank_as_the_others(tmp_path, words, inherited, threads):
    service, notes = FakeService([configuration(1, 32), configuration(2, 32)]), Notes()
    bench = Bench(tmp_path, service, measured(service), notes)
    bench.runner.inherited.update(inherited)
    work_through(bench.runner, service.job("job-1"), Template(words))
    assert [environment.get("OMP_NUM_THREADS") for _, environment, _ in bench.started] == [threads, threads]


@pytest.mark.parametrize(
    ("inherited", "configured"),
    [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, "x"), ({"PYTORCH_ALLOC_CONF": "x"}, None)],
)
def test_the_allocator_of_a_launched_command_has_segments_that_grow_unless_the_user_configured_it(
    tmp_path, inherited, configured
):
    service, notes = FakeService([configuration(1, 32)]), Notes()
    bench = Bench(tmp_path, service, measured(service), notes)
    bench.runner.inherited.update(inherited)
    work_through(bench.runner, service.job("job-1"), Template(("train.py",)))
    assert [environment.get("PYTORCH_CUDA_ALLOC_CONF") for _, environment, _ in bench.started] == [configured]


def test_a_command_gets_a_token_for_its_job_that_expires_and_never_the_users(tmp_path):
    """Every rank, and each of its child processes, once received the token of the user or the administrator."""
    service, notes = FakeService([configuration(1, 32), configuration(2, 32)]), Notes()
    bench = Bench(tmp_path, service, measured(service), notes)
    tune(bench, service)
    assert all("TULA_TOKEN" not in environment for _, environment, _ in bench.started)  # a service without tokens
    service = FakeService([configuration(1, 32), configuration(2, 32)])
    bench = Bench(tmp_path, service, measured(service), notes)
    bench.runner.inherited["TULA_TOKEN"] = "the user's"
    tune(bench, service)
    assert [environment["TULA_TOKEN"] for _, environment, _ in bench.started] == ["secret of job-1"] * 2
    (wanted,) = [details[0] for name, *details in service.calls if name == "create_token"]
    assert (wanted.scope, wanted.job_id) == ("agent", "job-1")
    assert 0 < wanted.expires_in_s <= 31 * 86_400


def test_runs_that_need_more_nodes_than_there_are_are_not_waited_for(tmp_path):
    service, notes = FakeService(THREE), Notes()
    bench = Bench(tmp_path, service, measured(service), notes)
    with pytest.raises(LaunchError, match="need at least 4 nodes, but --nodes is 2"):
        tune(bench, service, node_budget=2)
    assert [run.state for run in service.runs.values()] == ["pending", "succeeded", "succeeded"]


def test_a_plan_that_is_about_to_hold_smaller_runs_is_waited_for(tmp_path):
    service, notes = FakeService(THREE[:1]), Notes()
    bench = Bench(tmp_path, service, measured(service), notes)
    claim, claims = service.claim, []

    def planned_meanwhile(job_id, request):
        claims.append(request)
        if len(claims) == 4:  # another tula's run has ended, and the service has replanned
            service.change(next(iter(service.runs)), state="cancelled")
            service.add("profile", THREE[2])
        return claim(job_id, request)

    service.claim = planned_meanwhile
    tuned = tune(bench, service, node_budget=2)
    assert [run.state for run in tuned.job.plan] == ["cancelled", "succeeded"]


def test_runs_go_in_parallel_within_the_node_budget(tmp_path):
    service, notes = FakeService(THREE), Notes()
    at_once = []

    def fate(command, environment, log):
        process = measured(service)(command, environment, log)
        process.left = 50
        at_once.append({run.id: run.configuration.num_nodes for run in service.runs.values() if run.state == "running"})
        return process

    bench = Bench(tmp_path, service, fate, notes)
    tune(bench, service, max_parallel=3, node_budget=4)
    assert bench.started[1][0] == ["launch", "2", "64", "1"]
    assert [sum(nodes.values()) for nodes in at_once] == [0, 0, 2]  # 4; then 2 and 1 side by side


def test_a_first_run_that_fails_stops_with_its_last_lines_and_gives_the_rest_back(tmp_path):
    service, notes = FakeService(THREE), Notes()

    def fate(command, environment, log):
        log.write_text("Traceback (most recent call last):\n  File x\nValueError: no such dataset\n")
        return FakeProcess(status=1)

    bench = Bench(tmp_path, service, fate, notes)
    with pytest.raises(LaunchError, match=r"(?s)exit code 1.*ValueError: no such dataset"):
        tune(bench, service)
    assert [run.state for run in service.runs.values()] == ["failed", "pending", "pending"]
    assert "ValueError" in service.runs["r0"].message


@pytest.mark.parametrize("allowed", [2, 3])
def test_failures_in_a_row_are_counted_in_words_that_fit_every_number(tmp_path, allowed):
    service, notes = FakeService([configuration(1, 8 * n) for n in range(1, 6)]), Notes()
    service.change("r0", state="succeeded", num_samples=9)
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(status=1), notes)
    with pytest.raises(LaunchError, match=rf" {allowed} runs in a row have failed\."):
        tune(bench, service, max_failures=allowed)
    assert len(bench.started) == allowed


def test_an_out_of_memory_is_reported_and_the_plan_goes_on(tmp_path):
    service, notes = FakeService(THREE), Notes()

    def fate(command, environment, log):
        return FakeProcess(status=137) if command[2] == "32" else measured(service)(command, environment, log)

    bench = Bench(tmp_path, service, fate, notes)
    tune(bench, service)
    assert [run.state for run in service.runs.values()] == ["out_of_memory", "succeeded", "succeeded"]


def test_a_script_without_the_agent_fails_with_the_remedy(tmp_path):
    service, notes = FakeService(THREE), Notes()
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(), notes)
    with pytest.raises(LaunchError, match=r"no measurement arrived: call tula_agent.init\(\)"):
        tune(bench, service)


def test_a_run_that_sends_nothing_is_noted_within_a_minute(tmp_path):
    service, notes = FakeService(THREE[:1]), Notes()
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(lasts=1300), notes)  # 65 s
    with pytest.raises(LaunchError, match="no measurement arrived"):
        tune(bench, service)
    assert len([note for note in notes.notes if "no measurement after 60 s" in note]) == 1


def test_the_time_limit_counts_anew_from_the_first_measurement(tmp_path):
    """A long start-up does not shorten the time for the steps; a command without measurements has the same limit."""
    service, notes = FakeService(THREE[:1]), Notes()

    class Slow(FakeProcess):
        def poll(self):
            if bench.now >= 80:
                service.change("r0", num_samples=9)
            return super().poll()

    bench = Bench(tmp_path, service, lambda *_: Slow(lasts=2600), notes, time_limit_s=100)  # 130 s
    tune(bench, service)
    assert service.runs["r0"].state == "succeeded"
    bench = Bench(tmp_path, FakeService(THREE[:1]), lambda *_: FakeProcess(lasts=2600), notes, time_limit_s=100)
    with pytest.raises(LaunchError, match="did not finish within its time limit of 100 s"):
        tune(bench, bench.runner.service)


def test_a_script_that_ignores_its_batch_stops_the_plan(tmp_path):
    service, notes = FakeService(THREE), Notes()
    service.change("r0", configuration_mismatch="Run r0 was planned with local batch 32, but used 8.")
    bench = Bench(tmp_path, service, measured(service), notes)
    with pytest.raises(LaunchError, match="but used 8"):
        tune(bench, service)
    assert service.runs["r0"].state == "failed"  # so that the next start repeats it


def test_runs_asked_for_again_come_before_the_plan(tmp_path):
    service, notes = FakeService(THREE), Notes()
    service.change("r0", state="succeeded", num_samples=9)
    bench = Bench(tmp_path, service, measured(service), notes)
    tuned = tune(bench, service, again=(THREE[0],))
    assert [command[1:3] for command, _, _ in bench.started] == [["4", "32"], ["2", "64"], ["1", "128"]]
    assert [run.id for run, _ in tuned.finished] == ["r3", "r1", "r2"]
    with pytest.raises(LaunchError, match="--again needs 4 nodes, but --nodes is 2"):
        tune(bench, service, again=(THREE[0],), node_budget=2)


def test_a_configuration_to_measure_again_is_named_by_state_shape_or_run():
    service = FakeService()
    ends = [(THREE[0], "succeeded"), (THREE[1], "failed"), (THREE[1], "succeeded"), (THREE[2], "failed")]
    for one, state in ends:
        service.add("profile", one, state)
    service.add("train", configuration(8, 8), "failed")
    service.add("profile", configuration(3, 8), "pending")
    newest_first = list(service.runs.values())[::-1]

    def again(*wanted):
        return to_measure_again(wanted, newest_first, [configuration(4, 64), configuration(4, 64, 2)])

    assert again("failed") == (THREE[2],)  # the newest run of the second has succeeded
    assert set(again("all")) == set(THREE)
    assert again("r0", "4x32") == (THREE[0],)
    assert again("4x64x2", "4x64") == (configuration(4, 64, 2), configuration(4, 64))
    for word in ("8x8", "r4", "everything", "4x"):
        with pytest.raises(UsageError, match="give failed, all, nodes x local batch"):
            again(word)


OPTIONS = {"precision": ["fp32", "bf16"], "workers": ["4", "8"]}
WITH_OPTIONS = Template((*TEMPLATE.words, "{precision}", "{workers}"), frozenset(OPTIONS))


def with_options(nodes=1, batch=32, precision="fp32", workers="4"):
    return configuration(nodes, batch, precision=precision, workers=workers)


def test_each_launch_of_the_plan_has_the_words_of_its_options(tmp_path):
    service = FakeService([with_options(1), with_options(2, precision="bf16")], options=OPTIONS)
    bench = Bench(tmp_path, service, measured(service), Notes())
    with bench.runner:
        work_through(bench.runner, service.job("job-1"), WITH_OPTIONS)
    assert [command[-2:] for command, _, _ in bench.started] == [["fp32", "4"], ["bf16", "4"]]
    assert bench.started[1][1]["TULA_OPTIONS"] == "precision=bf16,workers=4"


@pytest.mark.parametrize("chosen", [{}, {"precision": "fp8", "workers": "4"}, {"precision": "bf16"}])
def test_a_run_with_options_that_the_job_lacks_is_not_started(tmp_path, chosen):
    service = FakeService([configuration(**chosen)], options=OPTIONS)
    bench = Bench(tmp_path, service, measured(service), Notes())
    with pytest.raises(LaunchError, match="which the job's specification does not allow"), bench.runner:
        work_through(bench.runner, service.job("job-1"), WITH_OPTIONS)
    assert bench.started == []


def test_values_that_crash_at_every_launch_end_no_plan(tmp_path):
    """If launches with other option values fail, however often, this says nothing about the options' base values."""
    crashing = [with_options(nodes, precision="bf16") for nodes in (1, 2, 3, 4)]
    service, notes = FakeService([with_options(1), *crashing, with_options(4)], options=OPTIONS), Notes()

    def fate(command, environment, log):
        return FakeProcess(status=1) if "bf16" in command else measured(service)(command, environment, log)

    bench = Bench(tmp_path, service, fate, notes)
    with bench.runner:
        tuned = work_through(bench.runner, service.job("job-1"), WITH_OPTIONS)
    assert [run.state for run in tuned.job.plan] == ["succeeded", *["failed"] * 4, "succeeded"]
    said = [note for note in notes.notes if "The rest of the plan continues" in note]
    assert said[0].startswith("Run r1 failed with bf16, workers 4. The rest of the plan continues.")
    assert len(said) == 4


def test_a_crash_with_todays_values_ends_the_plan_at_once(tmp_path):
    service = FakeService([with_options(1), with_options(2, precision="bf16")], options=OPTIONS)
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(status=1), Notes())
    with pytest.raises(LaunchError, match="run r0 failed"), bench.runner:
        work_through(bench.runner, service.job("job-1"), WITH_OPTIONS)
    assert len(bench.started) == 1


def test_a_configuration_is_named_with_the_options_that_are_not_todays():
    service = FakeService()
    for one in (with_options(2, 64), with_options(2, 64, precision="bf16")):
        service.add("profile", one, "succeeded")

    def named(word):
        return to_measure_again((word,), list(service.runs.values()), [], OPTIONS)

    assert named("2x64") == (with_options(2, 64),)
    assert named("2x64,precision=bf16") == named("r1") == (with_options(2, 64, precision="bf16"),)
    assert named("2x64,workers=8,precision=bf16") == (with_options(2, 64, "bf16", "8"),)  # not launched yet
    for word, sentence in (
        ("2x64,precision=fp8", "--again 2x64,precision=fp8: option 'precision' of this job has no value 'fp8': use f"),
        ("2x64,zero=1", "--again 2x64,zero=1: this job has no option 'zero': use precision, workers"),
        ("2x64,bf16", "--again 2x64,bf16: 'bf16' must be an option and its value, as in 2x64,precision=bf16"),
    ):
        with pytest.raises(UsageError) as caught:
            named(word)
        assert str(caught.value).startswith(sentence)


def test_what_explains_is_the_measured_base_with_one_value_that_nothing_was_launched_with():
    service = FakeService(options=OPTIONS)
    for one in (with_options(1, 128), with_options(4, 32), with_options(4, 64), with_options(4, 64, "bf16")):
        service.add("profile", one, "succeeded")
    job = service.job("job-1")
    assert to_explain(job, with_options(4, 8, "bf16")) == (with_options(4, 64, workers="8"),)
    assert to_explain(job, None) == (with_options(1, 128, workers="8"),)
    assert to_explain(FakeService([with_options()], options=OPTIONS).job("job-1"), None) == ()


def test_the_cost_of_explaining_is_said_by_the_launches_of_the_plan():
    service = FakeService(options=OPTIONS)
    started = datetime(2026, 1, 1, tzinfo=UTC)
    run = service.add("profile", with_options(4, 64), "succeeded")
    service.change(run.id, started_at=started, finished_at=started + timedelta(seconds=90))
    job = service.job("job-1")
    priced = [one.model_copy(update={"price": Price(usd_per_node_hour=10.0)}) for one in job.spec.cluster]
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"cluster": priced})})
    assert cost_of_explaining(job, to_explain(job, None)) == (
        "--explain launches 2 more values (bf16, workers 8), one launch each, for a total of about 3 min and $2.00."
    )


def test_a_service_that_is_away_for_a_while_is_waited_for(tmp_path):
    service, notes = FakeService(THREE), Notes()

    def fate(command, environment, log):
        process = measured(service)(command, environment, log)
        service.away = 3
        return process

    bench = Bench(tmp_path, service, fate, notes)
    tuned = tune(bench, service)
    assert [run.state for run in tuned.job.plan] == ["succeeded"] * 3
    assert notes.waits
    assert "The service is unreachable" in notes.waits[0]


def test_a_proxy_that_answers_for_a_service_that_is_away_is_waited_for_too(tmp_path):
    """A 403 or 404 of the proxy is no refusal; only a problem document of the service is one."""
    notes, answers = Notes(), [Answer(status, {}, b"<html>gone</html>") for status in (404, 403)]

    def ask():
        if answers:
            raise _calls.parse_error(answers.pop())
        return "answer"

    assert Bench(tmp_path, FakeService(), lambda *_: FakeProcess(), notes).runner.retrying(ask) == "answer"
    assert "without a problem document" in notes.waits[0]


def test_a_service_that_stays_away_ends_it_with_every_command_stopped(tmp_path):
    service, notes = FakeService(THREE), Notes()

    def fate(command, environment, log):
        service.away = 10_000
        return FakeProcess(lasts=3)

    bench = Bench(tmp_path, service, fate, notes)
    with pytest.raises(ServiceUnreachableError):
        tune(bench, service)
    assert bench.now >= RETRY_S


def test_ctrl_c_stops_the_command_and_gives_the_lease_back(tmp_path):
    service, notes = FakeService(THREE), Notes()
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(lasts=10_000), notes)
    sleeps = []

    def interrupted(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 5:
            raise KeyboardInterrupt

    bench.runner.sleep = interrupted
    with pytest.raises(KeyboardInterrupt):
        tune(bench, service)
    assert bench.started[0][2].asked == ["stop", "stop"]
    assert service.runs["r0"].state == "pending"


def test_runs_left_leased_by_a_tula_that_died_are_done_first_and_finished_ones_not_again(tmp_path):
    service, notes = FakeService(THREE), Notes()
    service.change("r0", state="succeeded", num_samples=9)
    service.change("r1", state="running")
    service.holders = {"r1": "me"}
    bench = Bench(tmp_path, service, measured(service), notes)
    tune(bench, service)
    assert [environment["TULA_RUN_ID"] for _, environment, _ in bench.started] == ["r1", "r2"]


@pytest.mark.parametrize("name", ["cancelled", os.fsdecode(b"other encoding \xff")])
def test_a_cluster_job_left_by_a_vanished_machine_is_cancelled_by_the_next_tula(tmp_path, name):
    service, notes = FakeService(THREE[:1]), Notes()
    cancelled = tmp_path / name
    stop = Template(("touch", f"{cancelled}-{{launch_id}}"))
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(lasts=10_000), notes, stop_template=stop)
    bench.runner.start(service.runs["r0"], TEMPLATE)  # then the machine is gone: the run is neither stopped nor judged
    service.holders = {"r0": "me"}
    again = Bench(tmp_path, service, measured(service), notes, stop_template=stop)
    again.runner.inherited["PATH"] = os.environ["PATH"]
    tune(again, service)
    (left,) = tmp_path.glob(f"{name}-r0-*")
    assert notes.notes == [
        f"Ran the stop command that the interrupted launch {left.name.removeprefix(f'{name}-')} left behind."
    ]
    assert not list(again.work.path.glob("submitted-*"))


def test_a_stop_command_gets_the_values_of_the_command_that_it_stops(tmp_path):
    service = FakeService(THREE[:1])
    stop = Template(("stop", "{checkpoint_dir}", "{learning_rate_factor}"))
    bench = Bench(tmp_path, service, measured(service), Notes(), stop_template=stop)
    bench.runner.start(service.runs["r0"], TEMPLATE, checkpoints=tmp_path / "c", learning_rate_factor=2.0)
    assert bench.stop_commands == [["stop", str(tmp_path / "c"), "2"]]


def test_no_start_is_judged_by_what_an_earlier_start_of_the_same_run_printed(tmp_path):
    service, notes = FakeService(THREE[:1]), Notes()

    def fate(command, environment, log):
        logs.append(log)
        if len(logs) > 1:
            return measured(service)(command, environment, log)
        log.write_text("exitcode : -9\n")  # torchrun, when its ranks were killed with it
        return FakeProcess(lasts=10_000)

    logs = []
    bench = Bench(tmp_path, service, fate, notes)
    bench.runner.abandon(bench.runner.start(service.runs["r0"], TEMPLATE))
    tune(bench, service)
    assert notes.ends == [("r0", "succeeded")]
    assert logs[0] != logs[1]


def test_a_run_held_elsewhere_is_waited_for(tmp_path):
    service, notes = FakeService(THREE[:1]), Notes()
    service.change("r0", state="running")
    service.holders = {"r0": "another machine"}
    bench = Bench(tmp_path, service, measured(service), notes)
    sleep = bench.runner.sleep

    def until_done(seconds):
        sleep(seconds)
        if bench.now > 5:
            service.change("r0", state="succeeded")

    bench.runner.sleep = until_done
    assert tune(bench, service).finished == ()
    assert notes.waits


def test_a_run_past_its_time_limit_shows_its_stacks_and_fails(tmp_path):
    service, notes = FakeService(THREE), Notes()
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(lasts=10_000), notes, time_limit_s=3)
    with pytest.raises(LaunchError, match="did not finish within its time limit of 3 s"):
        tune(bench, service)
    assert bench.started[0][2].asked == ["stop with stacks"]


def test_the_lease_is_renewed_while_a_run_lasts(tmp_path):
    service, notes = FakeService(THREE[:1]), Notes()

    def fate(command, environment, log):
        process = measured(service)(command, environment, log)
        process.left = 2000  # 100 s at 0.05 s a look
        return process

    bench = Bench(tmp_path, service, fate, notes)
    tune(bench, service)
    assert 5 <= service.calls.count(("patch_run", "r0", "running")) <= 6  # every third of LEASE_S


@pytest.mark.parametrize(("inherited", "sent"), [({}, True), ({"TULA_SEND_OUTPUT": "0"}, False)])
def test_the_end_of_what_the_first_rank_writes_is_sent_unless_the_user_keeps_it(tmp_path, inherited, sent):
    service, seen = FakeService(THREE[:1]), []

    def fate(command, environment, log):
        log.write_text("x" * 70_000 + "\n[rank1]: other\nfirst\n")
        process = measured(service)(command, environment, log)
        process.left, ended = 800, process.during

        def end():
            seen.append(service.output.get("r0"))
            log.write_text("last\n")
            ended()

        process.during = end
        return process

    bench = Bench(tmp_path, service, fate, Notes(), inherited=inherited)
    tune(bench, service)
    assert seen == ["x" * 65_530 + "\nfirst" if sent else None]
    assert service.output.get("r0") == ("last" if sent else None)


def test_a_run_cancelled_at_the_service_is_stopped(tmp_path):
    service, notes = FakeService(THREE[:1]), Notes()

    def fate(command, environment, log):
        service.change("r0", state="cancelled")
        return FakeProcess(lasts=10_000)

    bench = Bench(tmp_path, service, fate, notes)
    tune(bench, service)
    assert notes.ends == [("r0", "cancelled")]


PLAN = [configuration(2, 64), configuration(2, 16), configuration(2, 32), configuration(1, 64)]


def shared_bench(tmp_path, agent, status=0):
    """Return the service, notes and bench of launches that measure several batches; `agent` simulates their agent."""
    service, notes = FakeService(PLAN), Notes()
    service.share_launches = True

    def fate(command, environment, log):
        smaller = dict(part.split("=") for part in environment.get("TULA_SMALLER_BATCHES", "").split(",") if part)
        runs = {int(size): run for size, run in smaller.items()} | {int(command[2]): environment["TULA_RUN_ID"]}
        return FakeProcess(status=status if smaller else 0, during=lambda: agent(service, runs))

    return service, notes, Bench(tmp_path, service, fate, notes)


def measure_all(service, runs):
    for run in runs.values():
        service.change(run, state="succeeded", num_samples=9)


def test_the_time_of_a_launch_is_that_of_its_largest_batch(tmp_path):
    def agent(service, runs):
        for run in runs.values():
            at = datetime(2026, 1, 1, tzinfo=UTC)
            service.change(run, state="succeeded", num_samples=9, started_at=at, finished_at=at + timedelta(seconds=9))

    service, notes, bench = shared_bench(tmp_path, agent)
    tune(bench, service)
    took = {service.runs[run_id].configuration: took_s for run_id, took_s in notes.took_s.items()}
    assert [took[configuration(2, batch)] for batch in (16, 32)] == [0.0, 0.0]
    assert took[configuration(2, 64)] > 0.0


def states_by_batch(service, nodes=2):
    found = [run for run in service.runs.values() if run.configuration.num_nodes == nodes]
    return {run.configuration.local_batch_size: run.state for run in found}


def test_one_command_measures_every_batch_of_a_cluster_and_gets_the_largest(tmp_path):
    service, _, bench = shared_bench(tmp_path, measure_all)
    tuned = tune(bench, service)
    assert [command[1:3] for command, _, _ in bench.started] == [["2", "64"], ["1", "64"]]
    assert bench.started[0][1]["TULA_SMALLER_BATCHES"] == "16=r1,32=r2"
    assert "TULA_SMALLER_BATCHES" not in bench.started[1][1]
    assert [run.state for run in tuned.job.plan] == ["succeeded"] * 4
    assert [run.configuration.local_batch_size for run, _ in tuned.finished] == [16, 32, 64, 64]


@pytest.mark.parametrize(
    ("reported", "status", "states", "outcomes"),
    [
        # out of memory at 32, which the agent reported; the same when the process was killed
        ({16: "succeeded", 32: "out_of_memory"}, 137, ("succeeded", "out_of_memory", "pending"), 2),
        ({16: "succeeded", 32: "running"}, 137, ("succeeded", "out_of_memory", "pending"), 2),
        ({16: "succeeded", 32: "running"}, 1, ("succeeded", "failed", "pending"), 2),
        # killed in the largest batch, before a sample of it
        ({16: "succeeded", 32: "succeeded"}, 137, ("succeeded", "succeeded", "out_of_memory"), 3),
        # between two batches, whether it succeeded or not
        ({16: "succeeded", 32: "succeeded"}, 0, ("succeeded", "succeeded", "pending"), 2),
        ({16: "succeeded", 32: "succeeded"}, 1, ("succeeded", "succeeded", "pending"), 2),
        # before any batch
        ({}, 1, ("pending", "pending", "failed"), 1),
        # the script ended by itself in the middle
        ({16: "succeeded", 32: "running"}, 0, ("succeeded", "succeeded", "pending"), 2),
    ],
)
def test_a_launch_that_ends_early_keeps_what_was_measured_and_gives_the_rest_back(
    tmp_path, reported, status, states, outcomes
):
    def agent(service, runs):
        for size, state in reported.items():
            service.change(runs[size], state=state, num_samples=9)

    service, notes, bench = shared_bench(tmp_path, agent, status)
    claimed = service.claim("job-1", ClaimRequest(holder="me", max_nodes=2, whole_launch=True))
    active = bench.runner.start(claimed.run, TEMPLATE, smaller=claimed.smaller)
    while (code := bench.runner.poll(active)) is None:
        bench.sleep(1.0)
    assert len(bench.runner.finish(active, code)) == len(notes.ends) == outcomes
    assert states_by_batch(service) == dict(zip((16, 32, 64), states, strict=True))
    between = list(reported.values()) == ["succeeded"] * 2 and states[-1] == "pending"
    assert any("before its local batch of 64 was measured" in note for note in notes.notes) == between


def test_an_interrupted_launch_gives_all_of_its_unfinished_runs_back(tmp_path):
    service, _, bench = shared_bench(tmp_path, measure_all)
    claimed = service.claim("job-1", ClaimRequest(holder="me", max_nodes=2, whole_launch=True))
    active = bench.runner.start(claimed.run, TEMPLATE, smaller=claimed.smaller)
    service.change("r1", state="succeeded", num_samples=9)
    bench.runner.abandon(active)
    assert states_by_batch(service) == {16: "succeeded", 32: "pending", 64: "pending"}


def test_a_script_whose_batches_cannot_be_cut_is_launched_once_per_batch_from_then_on(tmp_path):
    def agent(service, runs):
        service.change(runs[max(runs)], num_samples=9)

    service, notes, bench = shared_bench(tmp_path, agent)
    tuned = tune(bench, service)
    assert [command[1:3] for command, _, _ in bench.started] == [["2", "64"], ["2", "16"], ["2", "32"], ["1", "64"]]
    assert [run.state for run in tuned.job.plan] == ["succeeded"] * 4
    assert len([note for note in notes.notes if "profiling.share_launches" in note]) == 1
    assert not service.share_launches


def test_a_launch_whose_largest_run_is_cancelled_at_the_service_has_not_failed(tmp_path):
    """The command was stopped while it measured a smaller batch; this says nothing about the command."""

    def fate(command, environment, log):
        if "TULA_SMALLER_BATCHES" not in environment:
            return measured(service)(command, environment, log)
        service.change("r1", state="running", num_samples=9)
        service.change("r0", state="cancelled")
        return FakeProcess(lasts=10_000)

    service = FakeService(PLAN[:3])
    service.share_launches = True
    tune(Bench(tmp_path, service, fate, Notes()), service)
    assert states_by_batch(service) == {16: "cancelled", 32: "succeeded", 64: "cancelled"}


@pytest.mark.parametrize("asked", [0, 1])
def test_a_profiling_run_that_measured_enough_is_ended_from_outside_and_a_success(tmp_path, asked):
    """The script stays in its loop (`while step < n`, a bare `except`), but the agent has reported the run's end."""
    service, notes = FakeService([configuration()]), Notes()
    process = FakeProcess(lasts=10_000)
    bench = Bench(tmp_path, service, lambda *_: process, notes)

    def sleep(seconds):
        bench.now += seconds
        if (bench.now > 5 and service.runs["r0"].state == "claimed") or service.runs["r0"].state == "running":
            service.change("r0", state="succeeded", num_samples=8)
        if not asked and bench.now > 20:
            process.left = 0  # it ends by itself, in time

    bench.runner.sleep = sleep
    with bench.runner:
        tuned = work_through(bench.runner, service.job("job-1"), TEMPLATE)
    assert [outcome.state for _, outcome in tuned.finished] == ["succeeded"]
    assert process.asked == ["stop"] * asked
    assert bench.now < LEASE_S
