"""The user's launch command with placeholders, and its check against what the job will vary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tula_client.launch._errors import TemplateError
from tula_wire import Configuration, JobSpec

__all__ = ["PLACEHOLDERS", "Template"]

PLACEHOLDERS: Final = {
    "num_nodes": "nodes of this run",
    "ranks_per_node": "processes per node",
    "world_size": "processes in all",
    "local_batch_size": "examples per process and micro-step",
    "global_batch_size": "examples per optimizer step",
    "grad_accum_steps": "micro-steps per optimizer step",
    "instance_type": "name of the instance type, as in the job's cluster",
    "resume": "checkpoint directory on a restart; an argument that holds it is left out at the first start",
    "run_id": "the service's name of this run; the same when an interrupted run is started again",
    "launch_id": "a name of this one start, never given twice, for example to name a cluster job after it",
    "env_file": 'a JSON file {"env_vars": {...}} with the TULA_* variables, for launchers that pass no environment',
}

_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True)
class Template:
    """A command as words; `{name}` is filled in, `{{` and `}}` stand for braces, other braces stay as they are."""

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.words or not self.words[0].strip():
            raise TemplateError("no command was given: write it after `--`, as in `tula tune job.toml -- torchrun ...`")
        for name in sorted(self.placeholders - PLACEHOLDERS.keys()):
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise TemplateError(
                f"the command holds the unknown placeholder {{{name}}}: use one of {known}, "
                f"or write {{{{{name}}}}} for literal braces"
            )

    @property
    def placeholders(self) -> frozenset[str]:
        """Names between single braces, anywhere in the command."""
        return frozenset(
            match.group(1) for word in self.words for match in _TOKEN.finditer(word) if match.group(1) is not None
        )

    def fill(
        self,
        configuration: Configuration,
        *,
        run_id: str = "",
        launch_id: str = "",
        resume: str | None = None,
        env_file: str = "",
    ) -> list[str]:
        """The command for one run; an argument that holds `{resume}` is left out while `resume` is None."""
        values = {
            "num_nodes": str(configuration.num_nodes),
            "ranks_per_node": str(configuration.ranks_per_node),
            "world_size": str(configuration.world_size),
            "local_batch_size": str(configuration.local_batch_size),
            "global_batch_size": str(configuration.global_batch_size),
            "grad_accum_steps": str(configuration.grad_accum_steps),
            "instance_type": configuration.instance_type,
            "resume": resume or "",
            "run_id": run_id,
            "launch_id": launch_id,
            "env_file": env_file,
        }

        def replace(match: re.Match[str]) -> str:
            name = match.group(1)
            return values[name] if name is not None else match.group(0)[0]

        return [_TOKEN.sub(replace, word) for word in self.words if resume is not None or not _holds_resume(word)]

    def check(self, spec: JobSpec) -> None:
        """Raise `TemplateError` when the job varies something that the command cannot be told."""
        has = self.placeholders
        for needed, varies, because in _needs(spec):
            if varies and not any(names <= has for names in needed):
                wanted = " or ".join(" with ".join(f"{{{n}}}" for n in sorted(names)) for names in needed)
                raise TemplateError(f"the command has no {wanted}, but {because}: add it where the launcher expects it")

    @property
    def can_accumulate(self) -> bool:
        """True when the command can be told to accumulate gradients."""
        return _can_accumulate(self.placeholders)


def _holds_resume(word: str) -> bool:
    return any(match.group(1) == "resume" for match in _TOKEN.finditer(word))


def _can_accumulate(names: frozenset[str]) -> bool:
    return "grad_accum_steps" in names or {"local_batch_size", "global_batch_size"} <= names


def _needs(spec: JobSpec) -> list[tuple[tuple[frozenset[str], ...], bool, str]]:
    """(sets of placeholders of which one must be there whole, whether the job varies it, why)."""
    clusters, batch = spec.cluster, spec.batch
    least, most = min(c.min_nodes for c in clusters), max(c.max_nodes for c in clusters)
    ranks = {c.ranks_per_node for c in clusters}
    one_batch = batch.max_local_batch_size == batch.min_local_batch_size and batch.global_batch_size is None
    accumulate: tuple[frozenset[str], ...] = (
        frozenset({"grad_accum_steps"}),
        frozenset({"local_batch_size", "global_batch_size"}),
    )
    return [
        (
            (frozenset({"num_nodes"}), frozenset({"world_size"})),
            least != most,
            f"the job tries {least} to {most} nodes",
        ),
        (
            (frozenset({"ranks_per_node"}), frozenset({"world_size"})),
            len(ranks) > 1,
            "the job's instance types differ in ranks_per_node",
        ),
        (
            (frozenset({"local_batch_size"}), frozenset({"global_batch_size"})),
            not one_batch,
            "the job tries several batch sizes",
        ),
        (
            accumulate,
            batch.max_grad_accum_steps > 1,
            f"the job allows up to {batch.max_grad_accum_steps} accumulation steps",
        ),
        (
            (frozenset({"instance_type"}),),
            len(clusters) > 1,
            f"the job offers {len(clusters)} instance types",
        ),
    ]
