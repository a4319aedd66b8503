"""Fills placeholders in the user's launch command, checks the command against the job, and defines ready-made templates
for common launchers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tula_client._errors import UsageError
from tula_wire import Configuration, JobSpec
from tula_wire.options import PLACEHOLDERS

_SMALL_FLOAT: Final = 1e-9  # because rounding may make dataset.size x epochs slightly too large
_WORD = re.compile(r"[A-Za-z0-9._:/@+-]{1,200}")
_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Template:
    """A command with placeholders, as a list of words.

    `{name}` is a placeholder, `{{` and `}}` are replaced by single braces, and other braces remain unchanged. options:
    the names of the job's options, which may also be used as placeholders.
    """

    words: tuple[str, ...]
    options: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.words or not self.words[0].strip():
            raise UsageError("the command is missing: write it after `--`, as in `tula tune job.toml -- torchrun ...`")
        for name in sorted(self.placeholders - PLACEHOLDERS.keys() - self.options):
            choices = ", ".join(f"{{{choice}}}" for choice in (*PLACEHOLDERS, *sorted(self.options)))
            raise UsageError(
                f"the command contains the unknown placeholder {{{name}}}: use one of {choices}, list its values under "
                f"[options] in the job, or write {{{{{name}}}}} for literal braces"
            )

    @property
    def placeholders(self) -> frozenset[str]:
        """Return the names of all placeholders in the command."""
        return frozenset().union(*map(_names_in, self.words))

    def fill(
        self,
        configuration: Configuration,
        *,
        run_id: str = "",
        launch_id: str = "",
        resume: Path | str | None = None,
        env_file: str = "",
        checkpoint_dir: Path | str = "",
        learning_rate_factor: float = 1.0,
        examples: float = 1.0,
    ) -> list[str]:
        """Return the command for one run, with all placeholders replaced.

        If `resume` is None, arguments that contain `{resume}` are omitted. `{max_steps}` is computed from `examples`,
        the number of examples in the whole training. Values are not quoted, since the command may pass them through any
        number of shells. Raises UsageError if a value from the service contains characters that a shell may interpret.
        """
        made_here = {"resume": str(resume or ""), "env_file": env_file, "checkpoint_dir": str(checkpoint_dir)}
        made_here["learning_rate_factor"] = f"{learning_rate_factor:.6g}"
        made_here["max_steps"] = str(math.ceil(examples / configuration.global_batch_size - _SMALL_FLOAT))
        given = {"run_id": run_id, "launch_id": launch_id, **dict(configuration.options)}

        def replace(match: re.Match[str]) -> str:
            name = match.group(1)
            if name is None:
                return match.group(0)[0]
            if name in made_here:
                return made_here[name]
            return _word(name, given[name] if name in given else getattr(configuration, name))

        kept = [word for word in self.words if resume is not None or "resume" not in _names_in(word)]
        return [_TOKEN.sub(replace, word) for word in kept]

    def check(self, spec: JobSpec) -> None:
        """Raise `UsageError` if the job varies a value for which the command has no placeholder."""
        for needed, varies, because in _needs(spec):
            if varies and not self._has(needed):
                placeholders = re.sub(r"\w+_\w+", r"{\g<0>}", needed)
                raise UsageError(
                    f"the command has no {placeholders}, but {because}: add it where the launcher expects it"
                )
        for name, values in spec.options.items():
            if name not in self.placeholders:
                raise UsageError(
                    f"the command has no {{{name}}}, but the job tries {' and '.join(values)} for this option: add the "
                    f"placeholder where the script expects the value, as in --{name.replace('_', '-')} {{{name}}}"
                )

    @property
    def can_accumulate(self) -> bool:
        """Return True if the command's placeholders tell the script how many gradients to accumulate."""
        return self._has(_ACCUMULATION)

    def _has(self, needed: str) -> bool:
        """Return True if the command has the placeholders that `needed` describes, such as `one or two with three`."""
        return any(set(names.split(" with ")) <= self.placeholders for names in needed.split(" or "))


def _word(name: str, value: object) -> str:
    text = str(value)
    if text and not _WORD.fullmatch(text):
        raise UsageError(
            f"the value of {{{name}}} would be {text!r}, which a shell may interpret: use only letters, digits and "
            ". _ : / @ + - in the job"
        )
    return text


def _names_in(word: str) -> frozenset[str]:
    return frozenset(name for name in _TOKEN.findall(word) if name)


_ACCUMULATION: Final = "grad_accum_steps or local_batch_size with global_batch_size"
"""The placeholders that tell a script how many micro-steps to accumulate."""


def _needs(spec: JobSpec) -> list[tuple[str, bool, str]]:
    """Return rules, each of which consists of placeholders, whether the job requires them, and the reason.

    A job requires the placeholders of values that it varies.
    """
    clusters, batch = spec.cluster, spec.batch
    least, most = min(c.min_nodes for c in clusters), max(c.max_nodes for c in clusters)
    ranks = {c.ranks_per_node for c in clusters}
    one_batch = batch.max_local_batch_size == batch.min_local_batch_size and batch.global_batch_size is None
    steps = batch.max_grad_accum_steps
    return [
        ("num_nodes or world_size", least != most, f"the job tries {least} to {most} nodes"),
        ("ranks_per_node or world_size", len(ranks) > 1, "the job's instance types differ in ranks_per_node"),
        ("local_batch_size or global_batch_size", not one_batch, "the job tries several batch sizes"),
        (_ACCUMULATION, steps > 1, f"the job allows up to {steps} accumulation steps"),
        ("instance_type", len(clusters) > 1, f"the job offers {len(clusters)} instance types"),
    ]


_SLURM_RANK: Final = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS; "
    'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1); '
    "export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + SLURM_STEP_ID) % 20000)); "
    'exec python "$@"'
)
"""Sets the five variables that `env://` of torch.distributed needs, since srun starts every rank without torchrun."""


@dataclass(frozen=True)
class Launcher:
    """A launcher and its template, which precedes the user's script and arguments in the command."""

    description: str
    words: tuple[str, ...]
    stop_words: tuple[str, ...] = ()


_SLURM: Final = (
    "srun --job-name=tula-{launch_id} --nodes={num_nodes} --ntasks={world_size} --ntasks-per-node={ranks_per_node} "
    "--kill-on-bad-exit=1 --export=ALL bash -c"
)
_RAY: Final = "ray job submit --submission-id=tula-{launch_id} --runtime-env={env_file} -- python"
LAUNCHERS: Final = {
    "torchrun": Launcher("all ranks on this machine", ("torchrun", "--standalone", "--nproc-per-node={world_size}")),
    "slurm": Launcher(
        "srun starts every rank, in the current allocation if there is one, otherwise in a new one",
        (*_SLURM.split(), _SLURM_RANK.replace("{", "{{").replace("}", "}}"), "tula"),
        ("scancel", "--name=tula-{launch_id}"),
    ),
    "ray": Launcher(
        "a Ray job whose script starts {world_size} workers itself, for example with TorchTrainer",
        tuple(_RAY.split()),
        ("ray", "job", "stop", "--no-wait", "tula-{launch_id}"),
    ),
}
"""The ready-made launchers by name."""


def with_launcher(name: str, command: list[str]) -> tuple[list[str], list[str]]:
    """Return two templates, which start and cancel `command` under the launcher `name`.

    Raises `UsageError` if the launcher is unknown.
    """
    launcher = LAUNCHERS.get(name)
    if launcher is None:
        raise UsageError(f"the launcher {name!r} is unknown: use one of {', '.join(LAUNCHERS)}")
    return [*launcher.words, *command], list(launcher.stop_words)
