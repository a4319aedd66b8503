"""Tests that interrupted launches of several batches lose no measurement and count none twice."""

from __future__ import annotations

import re
import signal
import sqlite3
from pathlib import Path

from benchmarks.support.forked import Server
from tests.e2e.command import BATCH, TORCHRUN, Tula, wait_until
from tula_wire import FabricProbe
from tula_wire.precision import MOST_TIMES

MEASURED = 8
STEPS = 2 + MEASURED  # steps of warm-up and of measurement


def states(tula: Tula, name: str) -> dict[tuple[int, int], str]:
    """Return the states of a job's runs by number of nodes and local batch."""
    return {(run.configuration.num_nodes, run.configuration.local_batch_size): run.state for run in tula.runs(name)}


def check_each_run_ended_once(database: Path) -> None:
    """Assert that each run ended once, and that each process that measured it stored every step of rank 0 once."""
    ended = """SELECT r.id, count(e.id) FROM runs r LEFT JOIN events e
        ON e.run_id = r.id AND json_extract(e.data, '$.state') = 'succeeded' GROUP BY r.id"""
    steps = """SELECT count(*), count(DISTINCT step), count(DISTINCT sequence) FROM step_samples
        WHERE rank = 0 GROUP BY run_key, source_key"""
    with sqlite3.connect(database) as store:
        assert {number for _, number in store.execute(ended)} == {1}
        measured = store.execute(steps).fetchall()
    assert len(measured) in (6, 7)  # 7 if two processes measured one run at the same time
    # On busy cores, the mean may not be precise after STEPS steps, and the run then takes more steps.
    most = STEPS + (MOST_TIMES - 1) * MEASURED
    assert set(measured) <= {(number, number, number) for number in range(1, most + 1)}
    assert sum(count >= STEPS for count, _, _ in measured) >= 6


def test_a_restarted_service_ctrl_c_and_a_lost_lease_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    database, folder = tmp_path / "tula.db", tmp_path / "files"
    folder.mkdir()
    for batch in (4, 8):
        (folder / f"wait-{batch}").touch()
    command = [*TORCHRUN, *BATCH, f"--folder={folder}"]
    with Server(f"sqlite:///{database}") as first_service:
        port, tula = first_service.port, Tula(first_service, tmp_path, forked=True)
        spec = tula.spec("shared", least_nodes=1, least_batch=2, search="full")
        first = tula.start("tune", spec, *command)
        wait_until(lambda: "waits for wait-4" in tula.logs())
        wait_until(lambda: states(tula, "shared")[1, 2] == "succeeded")
        first_service.kill()
    (folder / "wait-4").unlink()
    wait_until(lambda: "waits for wait-8" in tula.logs())  # one batch has been measured without the service
    with Server(f"sqlite:///{database}", port=port):
        wait_until(lambda: states(tula, "shared")[1, 4] == "succeeded")
        first.send_signal(signal.SIGINT)
        printed = "".join(first.communicate())
        assert first.returncode == 130
        assert re.search(r"plan +2 launches, 6 configurations, about .*\nstart ", printed)
        assert not tula.processes()
        done = {(1, 2): "succeeded", (1, 4): "succeeded"}
        pending = {(1, 8): "pending", (2, 2): "pending", (2, 4): "pending", (2, 8): "pending"}
        assert states(tula, "shared") == done | pending

        # Two commands continue at the same time, and a third takes over the lease of the first one's run.
        others = [tula.start("tune", spec, "--work-dir=one", *command, program=tula.called)]
        wait_until(lambda: states(tula, "shared")[1, 8] == "running")
        others.append(tula.start("tune", spec, "--work-dir=two", *command, program=tula.called))
        wait_until(lambda: states(tula, "shared")[2, 4] == "succeeded")

        def taken_over() -> bool:
            """Return whether the third command has started the run; if not, expire the lease of the first command."""
            if list(tmp_path.glob("three/*/logs/*.log")):
                return True
            with sqlite3.connect(database) as store:
                past = "UPDATE runs SET lease_expires_at = '2000-01-01 00:00:00.000000'"
                store.execute(f"{past} WHERE num_nodes = 1 AND state = 'running'")
            return False

        others.append(tula.start("tune", spec, "--work-dir=three", *command, program=tula.called))
        wait_until(taken_over)
        (folder / "wait-8").unlink()
        for process in others:
            out, said = process.communicate(timeout=150)
            assert process.returncode == 0, out + said
        assert states(tula, "shared") == dict.fromkeys(done | pending, "succeeded")
        check_each_run_ended_once(database)


def test_a_crash_in_the_middle_keeps_what_was_measured_and_the_same_command_measures_the_rest(
    server: Server, tmp_path: Path
) -> None:
    tula = Tula(server, tmp_path, forked=True)
    (tmp_path / "crash-4").touch()
    tune = ["tune", tula.spec("crash", least_batch=2, search="full"), *TORCHRUN, *BATCH, f"--folder={tmp_path}"]
    tuned, _ = tula(*tune)
    assert states(tula, "crash") == {(2, 2): "succeeded", (2, 4): "failed", (2, 8): "succeeded"}
    assert "ValueError: on purpose" in "".join(tuned["runs"][1]["lines"])
    again, _ = tula(*tune)
    assert [(run["configuration"]["local_batch_size"], run["state"]) for run in again["runs"]] == [(4, "succeeded")]
    assert again["recommendation"]["model"]["num_runs"] == 3
    assert not tula.processes()


def test_after_a_probe_one_launch_on_one_node_recommends_over_all_cluster_sizes_and_says_what_it_would_ask_next(
    server: Server, tmp_path: Path
) -> None:
    tula = Tula(server, tmp_path, forked=True)
    spec = Path(tula.spec("probed", least_nodes=1, nodes=4, least_batch=2, search="adaptive"))
    spec.write_text(spec.read_text().replace("{ min_nodes", "{ network_gbps = 10, min_nodes"))  # unlike other jobs
    readings = [{"size_bytes": size, "time_s": 2e-4 + 1e-9 * size, "repeats": 9} for size in (2**10, 2**18, 2**26)]
    measured = {"backend": "gloo", "num_nodes": 2, "ranks_per_node": 1, "all_ranks": readings, "network_gbps": 10}
    with tula.client() as client:
        client.send_probe(FabricProbe.model_validate(measured))

    _, said = tula("tune", str(spec), "--nodes=1", *TORCHRUN, *BATCH, fails=True)
    assert "the pending runs need at least" in said
    assert {run.configuration.num_nodes for run in tula.runs("probed") if run.state == "succeeded"} == {1}
    assert len(list(tmp_path.glob(".tula/*/logs/*.log"))) == 1
    found, _ = tula("recommend", "probed")
    assert found["basis"] == "probed"
    assert {each["configuration"]["num_nodes"] for each in found["candidates"]} == {1, 2, 4}
    width = {
        each["configuration"]["num_nodes"]: each["step_time_s"]["high"] / each["step_time_s"]["low"]
        for each in found["candidates"]
        if each["configuration"]["local_batch_size"] == 8
    }
    assert 1.0 < width[1] < width[2] < 10.0
    listed, _ = tula("jobs", "show", "probed")
    asked = [run for run in listed["runs"] if run["state"] == "pending"]
    assert asked
    assert found["chosen"]["configuration"] in [run["configuration"] for run in asked]
    assert all(run["purpose"] for run in asked)
