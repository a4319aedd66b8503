"""Tests that every code block of docs/embed.md runs unchanged in a separate process and reports what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.support.fork_server import ForkServer
from tests.agent.conftest import run_script
from tests.agent.sink import Sink

PAGE = Path(__file__).parents[2] / "docs" / "embed.md"
BLOCKS = re.findall(r"^## (.+?)$|^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Return the (heading, code) of each block."""
    found, heading = [], ""
    for title, code in BLOCKS:
        heading = title or heading
        if code:
            found.append((heading, code))
    return found


def test_the_page_has_a_block_for_every_way_to_embed() -> None:
    assert len(blocks()) == len({heading for heading, _ in blocks()}) == 9


@pytest.mark.parametrize(("heading", "code"), blocks(), ids=[heading for heading, _ in blocks()])
def test_every_block_of_the_page_runs_unchanged(
    sink: Sink, environment: dict[str, str], forks: ForkServer, tmp_path: Path, heading: str, code: str
) -> None:
    script = tmp_path / "block.py"
    script.write_text(code)
    done = run_script(forks, [str(script)], environment, tmp_path, ranks=int("init_process_group" in code))
    assert done.returncode == 0, done.stderr[-3000:]
    assert not sink.invalid
    if "estimate_memory" in code:
        assert "activation_bytes_per_sample" in done.stdout
    else:
        assert sink.states == ["running", "succeeded"]
        assert len(sink.steps()) >= 8
    assert heading != "Gradient accumulation, AMP, clipping" or {b["grad_accum_steps"] for b in sink.samples} == {4}
