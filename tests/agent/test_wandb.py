"""What a script gives to a real wandb, offline, is on the service's charts too; wandb has all of it."""

from __future__ import annotations

from pathlib import Path

from tests.agent.conftest import Launch
from tests.agent.sink import Sink


def test_numbers_given_to_wandb_are_telemetry_and_wandb_gets_all_of_them(
    sink: Sink, launch: Launch, tmp_path: Path
) -> None:
    quiet = {"WANDB_DIR": str(tmp_path), "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    done = launch("with_wandb.py", **quiet)
    assert not sink.invalid
    assert list(sink.column("loss")) == list(range(16))
    assert set(sink.column("tokens_per_s").values()) == {5.0}
    assert sink.column("validation_accuracy") == {7: 0.5, 15: 1.5}
    assert done.printed("known") == ["known ['Tokens per s', 'note', 'train/loss', 'val/acc']"]
    assert int(done.printed("steps")[0].split()[1]) >= 21
    assert "wandb is given failed" not in done.stderr
