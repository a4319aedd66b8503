"""Tests that the values of `run.log` also reach a real offline wandb run if the script requests this."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.conftest import Launch
from tests.agent.sink import Sink

QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


def test_numbers_logged_to_the_run_are_in_its_wandb_run_at_their_own_steps(
    sink: Sink, launch: Launch, tmp_path: Path
) -> None:
    done = launch("with_wandb.py", WANDB_DIR=str(tmp_path), **QUIET)
    found = rows(tmp_path)
    ours = [row for row in found if "tula/step" in row]
    assert [row["tula/step"] for row in ours] == list(range(16))
    assert {*ours[0]} == {"tula/grad_norm", "tula/step", "_step", "_timestamp", "_runtime"}
    logged = [row["tula/grad_norm"] for row in ours]
    assert logged == pytest.approx(list(sink.column("grad_norm").values()), rel=1e-4)
    losses = [row["train/loss"] for row in found if "train/loss" in row]
    assert [1 + loss for loss in losses] == pytest.approx(logged)
    axes = [each.metric for each in records(tmp_path) if each.WhichOneof("record_type") == "metric"]
    assert [(each.glob_name, each.step_metric) for each in axes] == [("tula/*", "tula/step")]
    assert not sink.invalid
    assert sink.column("loss") == {}
    assert "logging values failed" not in done.stderr


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the logged values of each row."""
    history = [each.history for each in records(folder) if each.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in history]


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of the only offline wandb run; its file is a LevelDB log after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        block_left = 32768 - at % 32768
        if block_left < 7:
            at += block_left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""
