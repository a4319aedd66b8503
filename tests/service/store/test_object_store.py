"""Tests the archive of telemetry in a bucket, with a real S3 API on loopback and a `tula prune` that is killed."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from pyarrow import compute, parquet
from werkzeug.serving import WSGIRequestHandler, make_server

from benchmarks.support.fork_server import ForkedProcess
from benchmarks.support.forked import fork_server
from tests.service.store.examples import a_chunk, a_job, a_run, add_chunk
from tula_service.store import Store
from tula_service.store.partitions import KEYS_OF_A_MONTH

MONTH = 202401
TABLE = f"telemetry_chunks_{MONTH}"
BUCKET = "telemetry"
CHUNKS, STEPS = 4, 50


class Quiet(WSGIRequestHandler):
    """A request handler that logs no requests."""

    def log_request(self, *_: object) -> None:
        pass


class ObjectStore:
    """An S3 server, run in a thread, that can kill a client process after a given number of changes by that process."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.kill_after = 0
        self.victim: Callable[[], ForkedProcess] | None = None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._request("PUT", "")

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Handle a request, and kill its sender before the response if the request was the last permitted change."""
        body = list(self._app(environ, start))
        if self.victim is not None and environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            self.kill_after -= 1
            if self.kill_after == 0:
                os.kill(self.victim().pid, signal.SIGKILL)
        return body

    def objects(self) -> dict[str, bytes]:
        """Return every object that a reader of the bucket can see, by its key."""
        keys = re.findall("<Key>([^<]+)</Key>", self._request("GET", "?list-type=2").decode())
        return {key: self._request("GET", f"/{key}") for key in keys}

    def _request(self, method: str, place: str) -> bytes:
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}
        answer = httpx.request(method, f"{self.url}/{BUCKET}{place}", headers=signed)
        return answer.raise_for_status().content

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def bucket() -> Iterator[ObjectStore]:
    made = ObjectStore()
    yield made
    made.close()


@pytest.fixture
def month(postgres_url: str, open_store: Callable[[str], Store]) -> Store:
    """Return a store with one old month of telemetry, which contains the chunks of one run."""
    store = open_store(postgres_url)
    run = a_run(store, a_job(store).id, kind="train", state="succeeded")
    key = MONTH * KEYS_OF_A_MONTH + 1
    bounds = f"FROM ({MONTH * KEYS_OF_A_MONTH}) TO ({(MONTH + 1) * KEYS_OF_A_MONTH})"
    with store.transaction() as tx:
        tx.connection.exec_driver_sql(f"CREATE TABLE {TABLE} PARTITION OF telemetry_chunks FOR VALUES {bounds}")
        tx.connection.exec_driver_sql("UPDATE runs SET key = %s WHERE id = %s", (key, run.id))
        for sequence in range(CHUNKS):
            add_chunk(tx, key, a_chunk(sequence, STEPS))
    return store


@pytest.fixture
def prune(month: Store, bucket: ObjectStore, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `tula prune --yes` and kills it at its `kill_after`-th change to the bucket."""

    def run(archive: str = f"s3://{BUCKET}/run1", kill_after: int = 0) -> tuple[int, str]:
        log = tmp_path / f"{kill_after}.log"
        started = threading.Event()
        processes: list[ForkedProcess] = []

        def victim() -> ForkedProcess:
            started.wait()
            return processes[0]

        bucket.kill_after, bucket.victim = kill_after, victim
        environment = os.environ | {
            "TULA_DATABASE": month.engine.url.render_as_string(hide_password=False),
            "TULA_TELEMETRY_DAYS": "30",
            "TULA_ARCHIVE": archive,
            "AWS_ENDPOINT_URL": bucket.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        processes.append(fork_server().start(["-m", "tula_service", "prune", "--yes"], environment, log))
        started.set()
        return processes[0].wait(60), log.read_text()

    return run


def rows_of(store: Store) -> int | None:
    """Return the number of chunks in the month's table, or None after the table is dropped."""
    with store.reading() as tx:
        if tx.connection.exec_driver_sql("SELECT to_regclass(%s)", (TABLE,)).scalar() is None:
            return None
        return int(tx.connection.exec_driver_sql(f"SELECT count(*) FROM {TABLE}").scalar_one())


def values_of(file: bytes) -> pa.Table:
    return parquet.read_table(io.BytesIO(file))


def test_a_month_comes_whole_into_a_bucket_however_often_its_writer_is_killed(
    month: Store, bucket: ObjectStore, prune: Callable[..., tuple[int, str]]
) -> None:
    """Writers are killed after the first change to the bucket, the second, and so on, until one succeeds.

    After each kill, the table or its file exists. A file that a reader can see is complete, and at the end there is no
    other object.
    """
    steps = np.arange(CHUNKS * STEPS)
    for kills in itertools.count():
        code, said = prune(kill_after=kills + 1)
        files = {key: file for key, file in bucket.objects().items() if key.endswith(".parquet")}
        assert all(values_of(file).num_rows == 2 * steps.size for file in files.values()), "no half of a month is read"
        if code == 0:
            break
        assert code == -signal.SIGKILL, said
        assert rows_of(month) == CHUNKS
    assert kills >= 4, "among them during the upload and between the copy and the deletion"
    assert rows_of(month) is None
    assert set(bucket.objects()) - {"run1/"} == {f"run1/{TABLE}-00001.parquet"}
    (file,) = files.values()
    stored = values_of(file)
    for name, values in (("loss", np.sqrt(steps)), ("grad_norm", steps)):
        mine = stored.filter(compute.equal(stored["name"], name))
        assert np.array_equal(mine["step"], steps)
        assert np.array_equal(mine["value"], values)


@pytest.mark.parametrize(
    ("archive", "said"),
    [("s3://nowhere/run1", "Bucket 'nowhere' not found"), ("s3:///run1", "bucket"), ("s4://telemetry/run1", "s4")],
)
def test_a_bad_address_is_refused_in_one_sentence_before_anything_changes(
    month: Store, prune: Callable[..., tuple[int, str]], archive: str, said: str
) -> None:
    code, text = prune(archive)
    assert (code, len(text.splitlines())) == (2, 1), text
    assert text.startswith("tula: Cannot write to TULA_ARCHIVE (")
    assert said in text
    assert "s3:// URL of an existing bucket" in text
    assert rows_of(month) == CHUNKS
