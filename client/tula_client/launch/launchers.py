"""Ready-made templates for the usual launchers; nothing of ours opens a connection to a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tula_client.launch._errors import TemplateError

__all__ = ["LAUNCHERS", "Launcher", "with_launcher"]

_SLURM_RANK: Final = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; "
    'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1); '
    "export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + SLURM_STEP_ID) % 20000)); "
    'exec python "$@"'
)
"""srun starts every rank itself; torch.distributed's `env://` wants these five variables."""


@dataclass(frozen=True)
class Launcher:
    """A template that stands before the user's script and its arguments."""

    name: str
    description: str
    words: tuple[str, ...]
    stop_words: tuple[str, ...] = ()


LAUNCHERS: Final = {
    launcher.name: launcher
    for launcher in (
        Launcher(
            "torchrun",
            "all ranks on this machine",
            ("torchrun", "--standalone", "--nproc-per-node={world_size}"),
        ),
        Launcher(
            "slurm",
            "srun starts every rank, inside an allocation or with one of its own",
            (
                "srun",
                "--job-name=tula-{launch_id}",
                "--nodes={num_nodes}",
                "--ntasks={world_size}",
                "--ntasks-per-node={ranks_per_node}",
                "--kill-on-bad-exit=1",
                "--export=ALL",
                "bash",
                "-c",
                _SLURM_RANK.replace("{", "{{").replace("}", "}}"),
                "tula",
            ),
            ("scancel", "--name=tula-{launch_id}"),
        ),
        Launcher(
            "ray",
            "a Ray job whose script starts {world_size} workers itself, for example with TorchTrainer",
            (
                "ray",
                "job",
                "submit",
                "--submission-id=tula-{launch_id}",
                "--runtime-env={env_file}",
                "--",
                "python",
            ),
            ("ray", "job", "stop", "--no-wait", "tula-{launch_id}"),
        ),
    )
}


def with_launcher(name: str, command: list[str]) -> tuple[list[str], list[str]]:
    """(whole template, template of the command that cancels it) for script and arguments under a named launcher."""
    launcher = LAUNCHERS.get(name)
    if launcher is None:
        raise TemplateError(f"the launcher {name!r} is unknown: use one of {', '.join(LAUNCHERS)}")
    return [*launcher.words, *command], list(launcher.stop_words)
