"""Every command and code block of README and documents is executed, or names the test that executes it.

A block may be preceded by a mark: `<!-- covered by: PATH -->` names the test or script that runs it,
`<!-- save as: NAME -->` writes it into the folder where the document's other blocks run. A document may begin with
`<!-- all blocks covered by: PATH -->`. In a `console` block, lines after `$ ` are run and the rest is what they print;
`...` stands for anything, and so do ids, times and measured numbers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server import Server
from tula_wire import JobSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (covered by|save as): (.+?) -->\s*$")
WHOLE = re.compile(r"^<!-- all blocks covered by: (.+?) -->", re.MULTILINE)
ELSEWHERE = {
    "docs/embed.md": "tests/agent/test_embed_page.py",
    "docs/wire.md": "tests/service/api/test_wire_document.py",
}
"""Documents whose every block another test runs."""
NO_CODE = {"text", "mermaid", "http", "math"}
VARYING = re.compile(r"(job|run|rec|tok|req)-[0-9a-f]{6,}|\d{4}-\d\d-\d\dT[\d:.]+Z|\b[0-9a-f]{16}\b|\d+\.\d+|\d{3,}")


@dataclass(frozen=True)
class Block:
    """A fenced block with its mark, and where it stands."""

    document: Path
    line: int
    kind: str
    body: str
    mark: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    whole = WHOLE.search(text)
    elsewhere = whole[1] if whole else ELSEWHERE.get(str(document.relative_to(ROOT)))
    for found in FENCE.finditer(text):
        mark = MARK.search(text[: found.start()])
        body = "".join(line.removeprefix(found["indent"]) for line in found["body"].splitlines(keepends=True))
        meaning = (mark[1], mark[2]) if mark else ("covered by", elsewhere) if elsewhere else None
        yield Block(document, text.count("\n", 0, found.start()) + 1, found["kind"], body, meaning)


ALL = [block for document in DOCUMENTS for block in blocks(document)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The service that the documents talk to."""
    with Server(str(tmp_path_factory.mktemp("documents") / "tula.db")) as running:
        yield running


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_is_of_a_kind_that_is_checked_and_what_covers_it_exists(block: Block) -> None:
    assert block.kind, f"{block}: name the block's language"
    if block.mark and block.mark[0] == "covered by":
        covering = ROOT / block.mark[1].split("::")[0].strip()
        assert covering.is_file(), f"{block}: {covering} does not exist"
    elif block.kind in ("bash", "sh", "shell"):
        pytest.fail(f"{block}: write it as a console block, or say which test runs it with a mark")
    elif block.kind == "json":
        json.loads(block.body)
    elif block.kind == "toml":
        tomllib.loads(block.body)
    elif block.kind in ("yaml", "yml"):
        import yaml

        list(yaml.safe_load_all(block.body))
    elif block.kind == "diff":
        assert_changes_the_example(block)
    else:
        assert block.kind in {"python", "console", *NO_CODE}, f"{block}: nothing here runs a {block.kind} block"


@pytest.mark.parametrize("block", [block for block in ALL if block.kind == "toml" and "[model]" in block.body], ids=str)
def test_every_job_specification_is_valid(block: Block) -> None:
    assert JobSpec.model_validate(tomllib.loads(block.body)).name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_and_programs_of_a_document_do_what_it_says(
    document: Path, server: Server, tmp_path: Path
) -> None:
    run = [block for block in blocks(document) if not (block.mark and block.mark[0] == "covered by")]
    for block in run:
        if block.mark:
            (tmp_path / block.mark[1]).write_text(block.body)
    console = [block for block in run if block.kind == "console"]
    if console:
        check_console(console, server, tmp_path)
    programs = [block.body for block in run if block.kind == "python"]
    if programs:
        check_programs(document, programs, server, tmp_path)


def check_console(console: list[Block], server: Server, folder: Path) -> None:
    """All console blocks of a document in one shell, as a reader would type them."""
    expected: list[tuple[Block, str]] = []
    script = []
    for block in console:
        for command, output in commands(block.body):
            command = command.replace("http://127.0.0.1:8321", server.url)
            script.append(f"{command}\nprintf '\\n\\036\\n'\n")
            expected.append((block, output))
    done = subprocess.run(
        ["bash"],
        input="exec 2>&1\n" + "".join(script),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(server),
        timeout=120,
        check=False,
    )
    printed = done.stdout.split("\n\036\n")[:-1]
    assert len(printed) == len(expected), done.stdout + done.stderr
    for (block, wanted), got in zip(expected, printed, strict=True):
        assert pattern(wanted).fullmatch(got.strip()), f"{block}: it says\n{wanted}\nbut it prints\n{got}"


def commands(body: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) in a console block; a command goes on in lines after `> `."""
    command, output = "", ""
    for line in [*body.splitlines(), "$ "]:
        if line.startswith("$ "):
            if command:
                yield command, output.strip()
            command, output = line[2:], ""
        elif line.startswith(">") and not output:
            command += "\n" + line[2:]
        else:
            output += line + "\n"


def pattern(wanted: str) -> re.Pattern[str]:
    """What may stand in place of an example's output: ids, times and measured numbers vary, `...` is anything."""
    parts = []
    for part in wanted.split("..."):
        last, made = 0, ""
        for found in VARYING.finditer(part):
            made += re.escape(part[last : found.start()]) + r"[\w.:-]+"
            last = found.end()
        parts.append(made + re.escape(part[last:]))
    return re.compile(".*".join(parts), re.DOTALL)


def check_programs(document: Path, programs: list[str], server: Server, folder: Path) -> None:
    """All Python blocks of a document in one process, each in a namespace of its own."""
    runner = folder / "run_blocks.py"
    runner.write_text(
        "import json, sys\n"
        "for number, source in enumerate(json.load(open(sys.argv[1])), 1):\n"
        "    exec(compile(source, f'block {number}', 'exec'), {'__name__': '__main__'})\n"
    )
    (folder / "blocks.json").write_text(json.dumps(programs))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(runner), str(folder / "blocks.json")],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(server),
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{document.name}: {done.stderr}"


def environment(server: Server) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TULA_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    # One rank, so that blocks which set up torch.distributed find a rendezvous.
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return kept | ranks | {"PATH": path, "TULA_URL": server.url, "OMP_NUM_THREADS": "1"}


def assert_changes_the_example(block: Block) -> None:
    """A diff's hunks are what the marked lines add to the example, no more and no less."""
    source = (ROOT / "examples" / "digits_ddp.py").read_text().splitlines()
    after = [line.removesuffix("  # tula").rstrip() for line in source]
    added = {line.removesuffix("  # tula").rstrip() for line in source if line.endswith("  # tula")}
    for hunk in re.split(r"^@@.*$\n", block.body, flags=re.MULTILINE):
        lines = hunk.rstrip("\n").splitlines()
        shown = [line[1:].rstrip() for line in lines if not line.startswith("-")]
        assert any(after[at : at + len(shown)] == shown for at in range(len(after))), f"{block}: not in the example"
        marked = {line[1:].rstrip() for line in lines if line.startswith("+")} - {""}
        assert marked <= added, f"{block}: {marked - added} is not marked in the example"


@pytest.mark.parametrize(("document", "test"), ELSEWHERE.items())
def test_a_document_said_to_be_run_elsewhere_is_named_there(document: str, test: str) -> None:
    assert Path(document).name in (ROOT / test).read_text()
