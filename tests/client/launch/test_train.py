"""Tests `tula run`: smaller configurations after out-of-memory errors, restarts after pre-emption, and resuming."""
# ruff: noqa: ARG001 (fakes take what the real ones take)

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.launch.fakes import TEMPLATE, Bench, FakeProcess, FakeService, Notes, candidate, configuration
from tula_client._errors import LaunchError
from tula_client.launch.template import Template
from tula_client.launch.train import next_smaller, train

RESUMING = Template((*TEMPLATE.words, "--resume={resume}"))


def go(bench, service, template=RESUMING, **options):
    with bench.runner:
        return train(bench.runner, service.job("job-1"), template, **options)


def trained_with(attempts):
    """Return the configuration of the attempt that succeeded."""
    return attempts[-1][0].configuration


def script(*fates):
    """Return a function that takes a service and returns a simulation of one command per fate.

    A fate is a pair: the command's exit status, and whether the command writes a checkpoint.
    """
    left = list(fates)

    def fate(command, environment, log):
        status, writes = left.pop(0)
        if writes:
            from pathlib import Path

            (Path(environment["TULA_CHECKPOINT_DIR"]) / f"step-{len(left)}").write_text("weights")
        run = environment["TULA_RUN_ID"]
        return FakeProcess(status=status, during=lambda: bench_service.change(run, num_samples=5))

    bench_service = fate.service = None

    def with_service(service):
        nonlocal bench_service
        bench_service = service
        return fate

    return with_service


def bench_of(tmp_path, service, notes, *fates, **options):
    return Bench(tmp_path, service, script(*fates)(service), notes, **options)


def test_training_uses_the_recommended_configuration(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    bench = bench_of(tmp_path, service, notes, (0, False))
    assert trained_with(go(bench, service)) == configuration(2, 64)
    assert [command for command, _, _ in bench.started] == [["launch", "2", "64", "1"]]


def test_a_training_with_another_configuration_than_planned_says_so(tmp_path):
    """With four ranks planned and one started, the last message used to be "Trained with 4 nodes"."""
    service, notes = FakeService(chosen=configuration(4)), Notes()
    bench = bench_of(tmp_path, service, notes, (0, False))
    bench_run = service.create_run

    def create(job_id, run):
        made = bench_run(job_id, run)
        return service.change(made.id, configuration_mismatch=f"Run {made.id} was planned with 4 ranks.")

    service.create_run = create
    ((_, outcome),) = go(bench, service)
    assert outcome.state == "succeeded"
    assert notes.notes == ["Run r0: was planned with 4 ranks. The measurement is kept for the configuration that ran."]


def test_output_of_a_training_is_printed_as_it_comes(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()

    def fate(command, environment, log):
        log.write_text("epoch 1\nepoch")

        def ends():
            assert notes.printed == ["epoch 1"]
            with log.open("a") as file:
                file.write(" 2\nend")

        return FakeProcess(lasts=3, during=ends)

    bench = Bench(tmp_path, service, fate, notes)
    go(bench, service)
    assert notes.printed == ["epoch 1", "epoch 2", "end"]


def test_out_of_memory_keeps_the_global_batch_first_and_says_what_it_does_to_the_learning_rate(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    bench = bench_of(tmp_path, service, notes, (137, True), (137, False), (0, False))
    trained = go(bench, service)
    assert [command[1:4] for command, _, _ in bench.started] == [["2", "64", "1"], ["2", "32", "2"], ["2", "16", "4"]]
    assert trained_with(trained).global_batch_size == 128
    assert "global batch stays 128, so keep the learning rate" in notes.notes[0]
    assert [environment["TULA_RESTART"] for _, environment, _ in bench.started] == ["0", "1", "2"]
    assert bench.started[0][0][4:] == []
    assert bench.started[1][0][4] == f"--resume={bench.work.checkpoints()}"


def test_without_a_way_to_accumulate_the_global_batch_falls_and_so_should_the_learning_rate(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    bench = bench_of(tmp_path, service, notes, (137, False), (0, False))
    trained = go(bench, service, Template(("launch", "{world_size}", "{local_batch_size}")))
    assert trained_with(trained) == configuration(2, 32)
    assert "falls from 128 to 64" in notes.notes[0]
    assert "by 0.5 (SGD, linear rule) or 0.707 (Adam" in notes.notes[0]


def test_the_memory_models_new_bound_is_respected(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    service.candidates = [candidate(configuration(4, batch), memory_fits=20 / batch - 0.2) for batch in (8, 16, 32)]
    bench = bench_of(tmp_path, service, notes, (137, False), (0, False))
    assert trained_with(go(bench, service)) == configuration(2, 16, 4)


def test_the_bound_after_an_out_of_memory_is_that_of_the_options_that_ran_out(tmp_path):
    """The recommended options may take more or less memory than those that a user requested."""
    service, notes = FakeService(chosen=configuration(2, 64, checkpointing="on")), Notes()
    service.candidates = [
        candidate(configuration(2, 32, checkpointing="on"), memory_fits=1.0),
        candidate(configuration(2, 32, checkpointing="off"), memory_fits=0.1),
        candidate(configuration(2, 16, checkpointing="off"), memory_fits=1.0),
        candidate(configuration(2, 32, checkpointing="off"), excluded_by="its local batch 32 is not below 32"),
    ]
    bench = bench_of(tmp_path, service, notes, (137, False), (0, False))
    trained = go(bench, service, configuration=configuration(2, 64, checkpointing="off"))
    assert trained_with(trained) == configuration(2, 16, 4, checkpointing="off")


def test_a_pre_empted_training_starts_again_from_its_checkpoint(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    bench = bench_of(tmp_path, service, notes, (143, True), (1, True), (0, False))
    trained = go(bench, service)
    assert [outcome.state for _, outcome in trained] == ["failed", "failed", "succeeded"]
    assert bench.started[2][0][4] == f"--resume={bench.work.checkpoints()}"


@pytest.mark.parametrize("status", [0, 1, 137])  # of 137: its command had to be killed
def test_a_training_that_a_user_cancelled_is_not_restarted(tmp_path, status):
    service, notes = FakeService(chosen=configuration()), Notes()

    def fate(command, environment, log):
        ended = {"state": "cancelled", "message": "Cancelled after 9 steps.", "num_samples": 5}
        return FakeProcess(status=status, during=lambda: service.change(environment["TULA_RUN_ID"], **ended))

    bench = Bench(tmp_path, service, fate, notes)
    with pytest.raises(LaunchError, match=r"after 9 steps\. Log:"):
        go(bench, service)
    assert len(bench.started) == 1


def test_a_training_is_ended_at_its_limit_and_not_restarted(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    service.time_limit_s = 60.0
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(lasts=100_000), notes)
    with pytest.raises(LaunchError, match=r"time limit of 1 min. To continue"):
        go(bench, service)
    ((_, _, process),) = bench.started
    assert process.asked == ["stop"]
    assert 60.0 <= bench.now < 61.0
    assert (service.runs["r0"].state, service.runs["r0"].end_cause) == ("cancelled", "time_limit")
    assert "Training will stop after 1 min" in notes.notes[0]


def test_a_failure_without_progress_is_not_repeated(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    bench = bench_of(tmp_path, service, notes, (1, False), (0, False))
    with pytest.raises(LaunchError, match="exit code 1"):
        go(bench, service)
    assert len(bench.started) == 1


@pytest.mark.parametrize(("saves", "starts"), [(False, 1), (True, 3)])
def test_a_training_past_its_time_limit_starts_again_only_if_it_has_saved(saves, starts, tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()

    def fate(command, environment, log):
        if saves:
            (Path(environment["TULA_CHECKPOINT_DIR"]) / environment["TULA_RESTART"]).write_text("weights")
        return FakeProcess(lasts=10_000)

    bench = Bench(tmp_path, service, fate, notes, time_limit_s=3)
    with pytest.raises(LaunchError):
        go(bench, service, max_restarts=2)
    assert len(bench.started) == starts


def test_restarts_are_bounded(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    bench = bench_of(tmp_path, service, notes, *[(143, True)] * 9)
    with pytest.raises(LaunchError, match="did not finish in 3 attempts"):
        go(bench, service, max_restarts=2)


def test_the_same_command_after_a_crash_goes_on_with_the_smaller_configuration(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    bench = bench_of(tmp_path, service, notes, (137, True), (0, False))
    starts = []

    def crash(seconds):
        starts.append(seconds)
        if len(bench.started) == 2:
            raise KeyboardInterrupt

    bench.runner.sleep = crash
    with pytest.raises(KeyboardInterrupt):
        go(bench, service)
    again = bench_of(tmp_path, service, notes, (0, False))
    assert trained_with(go(again, service)) == configuration(2, 32, 2)
    assert again.started[0][1]["TULA_RESTART"] == "2"
    assert again.started[0][0][4] == f"--resume={again.work.checkpoints()}"
    fresh = bench_of(tmp_path, service, notes, (0, False))
    assert trained_with(go(fresh, service)) == configuration(2, 64)


def test_every_start_says_which_run_it_goes_on_from(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    go(bench_of(tmp_path, service, notes, (143, True), (0, True)), service)
    go(bench_of(tmp_path, service, notes, (0, True)), service)
    assert service.continued == [None, "r0", None]  # the third is another training


def test_a_run_that_the_service_has_forgotten_does_not_keep_its_checkpoints_from_being_used(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    with pytest.raises(LaunchError):
        go(bench_of(tmp_path, service, notes, (143, True)), service, max_restarts=0)
    restored = FakeService(chosen=configuration())  # from a back-up of before that run
    bench = bench_of(tmp_path, restored, notes, (0, False))
    go(bench, restored)
    assert restored.continued == [None]
    assert bench.started[0][0][4] == f"--resume={bench.work.checkpoints()}"
    assert any("do not count toward the limits" in note for note in notes.notes)


def test_checkpoints_that_cannot_be_read_now_are_not_taken_for_none(tmp_path, monkeypatch):
    service, notes = FakeService(chosen=configuration()), Notes()
    first = bench_of(tmp_path, service, notes, (143, True))
    with pytest.raises(LaunchError):
        go(first, service, max_restarts=0)

    def stale(folder, *, onerror):
        onerror(OSError(errno.ESTALE, "Stale file handle"))
        return iter(())

    monkeypatch.setattr("os.walk", stale)
    again = bench_of(tmp_path, service, notes, (0, False))
    go(again, service)
    assert again.started[0][1]["TULA_CHECKPOINT_DIR"] == str(first.work.checkpoints())


def test_another_training_does_not_resume_from_the_checkpoints_of_the_one_before(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    first = bench_of(tmp_path, service, notes, (0, True))
    go(first, service)
    finished = bench_of(tmp_path, service, notes, (1, True), (1, False))
    with pytest.raises(LaunchError):
        go(finished, service)
    fresh = bench_of(tmp_path, service, notes, (0, False))
    go(fresh, service, fresh=True)
    folders = [
        environment["TULA_CHECKPOINT_DIR"] for bench in (first, finished, fresh) for _, environment, _ in bench.started
    ]
    work = first.work
    assert folders == [str(work.checkpoints(number)) for number in (1, 2, 2, 3)]
    assert any(work.checkpoints(1).iterdir())  # what was trained stays where it was


def test_reconfigure_continues_a_training_with_the_current_recommendation(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    bench = bench_of(tmp_path, service, notes, (143, True), (143, True))
    with pytest.raises(LaunchError):
        go(bench, service, max_restarts=1)
    service.chosen = configuration(4, 32)
    reconfigured = bench_of(tmp_path, service, notes, (0, False))
    assert trained_with(go(reconfigured, service, reconfigure=True)) == configuration(4, 32)
    assert reconfigured.started[0][0][4] == f"--resume={reconfigured.work.checkpoints()}"
    assert service.continued[-1] == "r1"


def test_a_start_without_a_checkpoint_does_not_fix_the_configuration(tmp_path):
    service, notes = FakeService(chosen=configuration(1, 32)), Notes()
    with pytest.raises(LaunchError):
        go(bench_of(tmp_path, service, notes, (1, False)), service)
    service.chosen = configuration(2, 64)  # tuned since
    bench = bench_of(tmp_path, service, notes, (0, False))
    assert trained_with(go(bench, service)) == configuration(2, 64)
    assert bench.started[0][1]["TULA_RESTART"] == "0"
    assert any("left no checkpoint, so training starts from the beginning" in note for note in notes.notes)


def test_a_training_that_is_interrupted_is_cancelled(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    bench = bench_of(tmp_path, service, notes, (0, False))
    bench.runner.sleep = lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        go(bench, service)
    assert [run.state for run in service.runs.values()] == ["cancelled"]


def test_training_without_measurements_notes_that_the_configuration_is_a_guess(tmp_path):
    service, notes = FakeService(chosen=configuration()), Notes()
    go(bench_of(tmp_path, service, notes, (0, False)), service)
    assert notes.notes == []
    service.basis = "prior"
    go(bench_of(tmp_path, service, notes, (0, False)), service)
    assert ["a guess" in note for note in notes.notes] == [True]


def test_training_without_a_recommendation_fails_with_the_reason(tmp_path):
    service, notes = FakeService(), Notes()
    with pytest.raises(LaunchError, match=r"no configuration to train with: No reason\."):
        go(bench_of(tmp_path, service, notes), service)


@given(
    batch=st.integers(1, 4096),
    accumulation=st.integers(1, 16),
    can_accumulate=st.booleans(),
    bound=st.none() | st.integers(1, 4096),
)
def test_every_fallback_is_smaller_and_the_chain_ends(batch, accumulation, can_accumulate, bound):
    now, seen = configuration(2, batch, accumulation), 0
    while (after := next_smaller(now, can_accumulate=can_accumulate, max_local_batch_size=bound)) is not None:
        assert after.local_batch_size < now.local_batch_size
        assert bound is None or after.local_batch_size <= bound
        if after.grad_accum_steps != now.grad_accum_steps:
            assert can_accumulate
            assert after.global_batch_size == now.global_batch_size
        else:
            assert after.global_batch_size < now.global_batch_size
        now, seen = after, seen + 1
    assert seen <= 4096


def test_a_training_that_nothing_measured_succeeds_with_a_note(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    bench = Bench(tmp_path, service, lambda *_: FakeProcess(), notes)
    ((_, outcome),) = go(bench, service)
    assert outcome.state == "succeeded"
    assert any("no measurement arrived" in note for note in notes.notes)


def test_a_training_takes_the_configuration_that_is_asked_for_and_the_learning_rate_factor_of_it(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64)), Notes()
    bench = bench_of(tmp_path, service, notes, (0, False))
    options = ("--max-steps={max_steps}", "--output-dir={checkpoint_dir}", "--lr-times={learning_rate_factor}")
    template = Template((*TEMPLATE.words, *options))
    attempts = go(bench, service, template, configuration=configuration(1, 32))
    assert trained_with(attempts) == configuration(1, 32)
    steps, folder, factor = bench.started[0][0][-3:]
    job = service.job("job-1").spec
    examples = job.dataset.size * job.epochs
    assert 0 <= 32 * int(steps.removeprefix("--max-steps=")) - examples < 32
    assert Path(folder.removeprefix("--output-dir=")).is_dir()
    assert factor == "--lr-times=1"
    assert any("No learning rate factor is known" in text for text in notes.notes)


def test_options_that_were_never_launched_take_the_learning_rate_factor_of_their_batch(tmp_path):
    service, notes = FakeService(chosen=configuration(2, 64, precision="fp32")), Notes()
    service.candidates = [
        candidate(configuration(1, 256, precision="fp32"), learning_rate_factor=1.0),  # one rank divides no step
        candidate(configuration(4, 64, precision="fp32"), learning_rate_factor=2.5),
    ]
    bench = bench_of(tmp_path, service, notes, (0, False))
    template = Template((*TEMPLATE.words, "--lr-times={learning_rate_factor}"))
    go(bench, service, template, configuration=configuration(8, 32, precision="bf16"))
    assert bench.started[0][0][-1] == "--lr-times=2.5"
    assert not any("learning rate factor" in text for text in notes.notes)
