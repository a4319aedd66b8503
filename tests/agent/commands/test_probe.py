"""What ranks measure for `tula probe`: sizes from small to large, within the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.conftest import Done
from tula_agent.commands import probe
from tula_wire import FabricProbe, read
from tula_wire.samples import PROBE_MARK

SCRIPT = Path(probe.__file__)


def test_two_ranks_agree_on_what_to_measure_and_the_first_prints_it(alone: Callable[..., Done]) -> None:
    done = alone(SCRIPT, "0.3", ranks=2)
    assert done.codes == [0, 0], done.stderr
    (line,) = done.printed(PROBE_MARK)
    found = read(FabricProbe, line.removeprefix(PROBE_MARK))
    assert (found.backend, found.num_nodes, found.ranks_per_node, found.in_node) == ("gloo", 1, 2, None)
    sizes = [each.size_bytes for each in found.all_ranks]
    assert sizes == [1024 * 4**power for power in range(len(sizes))]
    assert len(sizes) >= 3
    assert sum(each.time_s * each.repeats for each in found.all_ranks) < 3.0
    assert all(3 <= each.repeats <= 20 for each in found.all_ranks)


def test_one_rank_is_refused_with_what_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("sys.argv", ["probe", "1"])
    with pytest.raises(SystemExit, match="two ranks or more"):
        probe.main()
