"""Simulates a rank that knows its batch size and registers a run; ranks communicate through a store like torchrun's."""

from __future__ import annotations

from typing import Any

from tula_agent.config import WantedJob, read_config
from tula_agent.guard import Guard
from tula_agent.rank_channel import Channel
from tula_agent.ship.joining import Joining


class JoiningRank:
    """A stand-in with those recorder attributes that `Joining` reads; `start` is the number of restarts by torchrun."""

    def __init__(
        self,
        store: Any,
        rank: int,
        url: str,
        *,
        job: str = "elastic",
        start: int = 0,
        world_size: int = 2,
        token: str = "",
    ) -> None:
        environ = {"TULA_URL": url, "TULA_TOKEN": token, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        config = read_config(environ, WantedJob(job, 100))
        assert config is not None
        self.config, self.boot_id, self.model_parallel_size = config, f"boot{rank}", 1
        self.world_size = world_size
        self._channel = Channel(store, f"tula/{start}/", rank, world_size)
        self.joining = Joining(self, WantedJob(job, 100), 0, Guard())

    def channel(self) -> Channel:
        return self._channel

    def seen_configuration(self) -> tuple[int, int]:
        return 8, 2

    def joined(self, _run_id: str) -> None:
        pass
