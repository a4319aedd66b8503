"""Tests that the spool can be read back, whatever happened to its last bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_agent.ship.spool import Spool, SpooledRequest, encode, read_records, spool_files

envelopes = st.builds(
    SpooledRequest,
    method=st.just("POST"),
    path=st.just("/v1/runs/r/samples"),
    body=st.binary(max_size=60),
    values=st.integers(0, 10_000),
    lease=st.none() | st.integers(0, 100),
)


def written(path: Path, items: list[SpooledRequest]) -> list[int]:
    """Write `items`; return the length of the file after each of them."""
    spool, lengths = Spool(path, 2**20), []
    for item in items:
        assert spool.append(item)
        lengths.append(path.stat().st_size)
    return lengths


@given(items=st.lists(envelopes, max_size=6))
def test_spooled_requests_are_read_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, items: list[SpooledRequest]
) -> None:
    path = tmp_path_factory.mktemp("spool") / "a.spool"
    written(path, items)
    assert (list(read_records(path)) if items else []) == items


def test_a_file_cut_at_any_byte_keeps_every_record_before_the_cut(tmp_path: Path) -> None:
    items = [SpooledRequest("POST", "/v1/runs/r/samples", b'{"n": %d}' % n, n) for n in range(4)]
    lengths = written(tmp_path / "whole.spool", items)
    data = (tmp_path / "whole.spool").read_bytes()
    torn = tmp_path / "torn.spool"
    for cut in range(len(data) + 1):
        torn.write_bytes(data[:cut])
        assert list(read_records(torn)) == items[: sum(length <= cut for length in lengths)]


def test_any_flipped_byte_costs_one_record_at_most(tmp_path: Path) -> None:
    items = [SpooledRequest("POST", "/v1/runs/r/samples", b'{"n": %d}' % n, n) for n in range(4)]
    written(tmp_path / "whole.spool", items)
    data = (tmp_path / "whole.spool").read_bytes()
    damaged = tmp_path / "damaged.spool"
    for at in range(len(data)):
        damaged.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        found = list(read_records(damaged))
        assert len(found) >= 3
        assert all(envelope in items for envelope in found)


def test_appending_after_a_torn_tail_loses_only_the_torn_record(tmp_path: Path) -> None:
    items = [SpooledRequest("POST", "/v1/runs/r/samples", b'{"n": %d}' % n, n) for n in range(3)]
    path = tmp_path / "a.spool"
    lengths = written(path, items[:2])
    path.write_bytes(path.read_bytes()[: lengths[1] - 3])
    Spool(path, 2**20).append(items[2])
    assert list(read_records(path)) == [items[0], items[2]]


def test_a_write_goes_to_a_new_file_once_an_upload_has_renamed_the_one_before(tmp_path: Path) -> None:
    spool, path = Spool(tmp_path / "a.spool", 10**6), tmp_path / "a.spool"
    items = [SpooledRequest("POST", "/v1/runs/r/samples", b'{"n": %d}' % n, n) for n in range(2)]
    assert spool.append(items[0])
    path.rename(tmp_path / "a.spool.uploading")
    assert spool.append(items[1])
    assert list(read_records(tmp_path / "a.spool.uploading")) == [items[0]]
    assert list(read_records(path)) == [items[1]]


def test_a_write_that_an_upload_overtakes_is_repeated_into_a_new_file(tmp_path: Path, monkeypatch) -> None:
    """The upload reads and deletes the file after the agent has opened it and before the agent writes."""
    path, write = tmp_path / "a.spool", os.write
    item = SpooledRequest("POST", "/v1/runs/r/samples", b"{}", 1)

    def overtaken(descriptor: int, data: bytes) -> int:
        monkeypatch.undo()
        path.rename(tmp_path / "a.spool.1.uploading")
        assert list(read_records(tmp_path / "a.spool.1.uploading")) == []
        (tmp_path / "a.spool.1.uploading").unlink()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", overtaken)
    spool = Spool(path, 10**6)
    assert spool.append(item)
    assert list(read_records(path)) == [item]
    assert not spool.empty


def test_a_full_spool_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a.spool", 200)
    item = SpooledRequest("POST", "/v1/runs/r/samples", b"x" * 60)
    accepted = [spool.append(item) for _ in range(5)]
    assert accepted == [True, False, False, False, False]
    assert list(spool.requests()) == [item]
    spool.clear()
    assert spool.empty
    assert not spool.path.exists()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/tokens"),
        ("POST", "/v1/runs/../tokens"),
        ("PATCH", "/v1/runs/.."),
        ("PATCH", "/v1/runs/r/../../jobs/j/scaling"),
        ("POST", "/v1/runs/%2e%2e/tokens"),
        ("PATCH", "/v1/runs/r?x=1"),
        ("PATCH", "/v1/runs/r/samples"),
        ("POST", "/v1/runs/r"),
        ("DELETE", "/v1/runs/r"),
        ("POST", "/v1/runs/r/samples\n"),
    ],
)
def test_a_record_may_only_ask_for_what_agents_send(tmp_path: Path, method: str, path: str) -> None:
    """Otherwise, a spool could create an admin token: httpx resolves `..`, and an upload uses the user's token."""
    bad: Any = SpooledRequest(method, path, b"{}")  # type: ignore[arg-type]
    good = SpooledRequest("PATCH", "/v1/runs/r", b"{}")
    written(tmp_path / "a.spool", [bad, good])
    assert list(read_records(tmp_path / "a.spool")) == [good]


def test_the_spool_is_private_to_its_user(tmp_path: Path) -> None:
    written(tmp_path / "new" / "a.spool", [SpooledRequest("PATCH", "/v1/runs/r", b"{}")])
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    assert (tmp_path / "new" / "a.spool").stat().st_mode & 0o077 == 0
    assert spool_files(tmp_path / "new") == [tmp_path / "new" / "a.spool"]


def test_nan_never_reaches_the_wire() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"x": float("nan")})
