"""What a forked child of a training process (a data loading process) inherits of the agent: nothing."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tula_agent.recorder import Recorder

__all__ = ["forget_in_children"]


def forget_in_children(recorder: Recorder) -> None:
    """In a child the recorder is finished before it begins, and its exporter forgets what the parent had queued."""
    if not hasattr(os, "register_at_fork"):
        return
    reference = weakref.ref(recorder)

    def in_child() -> None:
        mine = reference()
        if mine is not None:
            mine.finished = True
            mine.exporter.forget()

    os.register_at_fork(after_in_child=in_child)
