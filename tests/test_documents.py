"""Tests that every command and code block of README and documents is executed, or names the test that executes it.

`bash` blocks are run. In a `console` block, lines after `$ ` are run and the other lines are the expected output, in
which `...`, ids, times and measured numbers match anything. `tula` and the service are real; launchers (torchrun, srun,
ray, mpirun, ...) are stand-ins that report what an agent in the job would report, and `tests/e2e` runs the real ones.

A mark may precede a block: `<!-- save as: NAME -->` writes the block into the folder where the document's other blocks
run, `<!-- covered by: PATH -->` names the test that runs it, and `<!-- needs NEED, checked by: PATH -->` says what this
machine lacks and what checks the block instead. `NEEDS` lists these blocks; every other block is run.
"""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.support import clean_environment
from benchmarks.support.forked import Server, fork_server
from benchmarks.support.forked_programs import programs
from benchmarks.support.postgres import PostgresServer
from tests.support.forked_commands import launchers
from tula_wire import JobSpec

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "skills").rglob("*.md")),
]
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (covered by|save as|needs .+?, checked by): (.+?) -->\s*$")
NEEDS = {
    "a container engine": ["docs/deploy.md"] * 3,
    "a Kubernetes cluster": ["docs/deploy.md", "docs/deploy.md"],
    "a package index": [
        "README.md",
        *(f"docs/{page}.md" for page in ("large-batches", "pay-the-bill", "run-a-cluster", "start")),
    ],
    "quiet cores and minutes": ["README.md", "docs/operations.md"],
}
"""What the blocks that no test runs need, and the documents that they stand in; every other block is run."""
ELSEWHERE = {
    "docs/embed.md": "tests/agent/test_embed_page.py",
    "docs/wire.md": "tests/service/api/test_wire_document.py",
}
"""Documents whose every block another test runs."""
NO_CODE = {"text", "mermaid", "http", "math"}
PROGRAM = re.compile(
    r"^\s*(\$ )?(tula|python3?|pip|make|curl|docker|kubectl|git|torchrun|srun|sbatch|mpirun|ray)\b", re.M
)
LAUNCHERS = ("torchrun", "srun", "sbatch", "ray", "mpirun", "kubectl", "scancel", "./submit.sh")
JOB = """\
name = "my-job"
epochs = 3
model = { name = "mlp" }
dataset = { size = 10000 }
cluster = { max_nodes = 2, price = { usd_per_node_hour = 1.0 } }
batch = { min_local_batch_size = 32, max_local_batch_size = 64 }
"""
"""`job.toml` of a document that shows none; each `tula tune` registers another job."""
OTHER_JOB = """\
tula() {
  if [ "$1" = tune ]; then JOBS=$((JOBS + 1)); sed -i "s/size = 1..../size = $((10000 + JOBS))/" job.toml; fi
  command tula "$@"
}
"""
VARYING = re.compile(r"(job|run|rec|tok|req)-[0-9a-f]{6,}|\d{4}-\d\d-\d\dT[\d:.]+Z|\b[0-9a-f]{16}\b|\d+\.\d+|\d{3,}")


@dataclass(frozen=True)
class Block:
    """A fenced block with its mark and position."""

    document: Path
    line: int
    kind: str
    body: str
    mark: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    elsewhere = ELSEWHERE.get(str(document.relative_to(ROOT)))
    for found in FENCE.finditer(text):
        mark = MARK.search(text[: found.start()])
        body = "".join(line.removeprefix(found["indent"]) for line in found["body"].splitlines(keepends=True))
        meaning = (mark[1], mark[2]) if mark else ("covered by", elsewhere) if elsewhere else None
        yield Block(document, text.count("\n", 0, found.start()) + 1, found["kind"], body, meaning)


ALL = [block for document in DOCUMENTS for block in blocks(document)]
RUN = list(dict.fromkeys(b.document for b in ALL if not b.mark and b.kind in ("bash", "console", "python")))
"""Documents with blocks that are run here."""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start the service of a document on a new database, so that documents do not see each other's jobs."""
    with Server(str(tmp_path_factory.mktemp("documents") / "tula.db")) as running:
        yield running


@pytest.fixture
def two_databases(postgres_server: PostgresServer) -> Iterator[dict[str, str]]:
    """Yield variables that name a filled and an empty Postgres database, and the folder of Postgres's programs."""
    urls = [postgres_server.create_database(template="tula_template"), postgres_server.create_database()]
    plain = [url.replace("+psycopg", "") for url in urls]
    yield {"DATABASE": plain[0], "RESTORED": plain[1], "PG_BIN": str(postgres_server.programs)}
    for url in urls:
        postgres_server.drop_database(url)


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_has_a_checked_language_and_an_existing_test(block: Block) -> None:
    assert block.kind, f"{block}: name the block's language"
    if block.mark and block.mark[0] != "save as":
        path = block.mark[1].split("::")[0].strip()
        assert (ROOT / path).is_file(), f"{block}: {path} does not exist"
        assert path.startswith("tests/") or block.mark[0] != "covered by", f"{block}: {path} is no test"
    elif block.kind in NO_CODE:
        assert block.mark or not PROGRAM.search(block.body), f"{block}: these are commands, so let them be run"
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
        assert block.kind in {"python", "console", "bash"}, f"{block}: nothing here runs a {block.kind} block"


def test_only_the_listed_blocks_are_not_run() -> None:
    unrun = [(block.mark[0], block) for block in ALL if block.mark and block.mark[0].startswith("needs ")]
    for need, where in NEEDS.items():
        found = [str(b.document.relative_to(ROOT)) for mark, b in unrun if mark == f"needs {need}, checked by"]
        assert found == where, need
    assert len(unrun) == sum(map(len, NEEDS.values()))


@pytest.mark.parametrize("document", ["README.md", "AGENTS.md"])
def test_every_link_of_a_page_in_the_root_leads_somewhere(document: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", (ROOT / document).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_page_for_agents_is_short_and_what_it_types_and_names_exists() -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 50, "one page"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    typed = re.findall(r"`(make|\.venv/bin/python -m pytest|\.venv/bin/)(?: ?)([\w./]+)", page)
    assert len(typed) > 5
    for program, word in typed:
        if program == "make":
            assert re.search(rf"^{word}:", makefile, re.M), word
        elif program.endswith("pytest"):
            assert (ROOT / word).is_file(), word
        else:
            assert (Path(sys.executable).parent / word).exists(), word
    folders = re.findall(r"^\| ((?:`[\w/]+`(?:, )?)+) \|", page, re.M)
    assert [name for row in folders for name in re.findall(r"`(.+?)`", row) if not (ROOT / name).is_dir()] == []


def test_the_skill_begins_with_its_name_and_when_to_use_it() -> None:
    for skill in (ROOT / "skills").glob("*/SKILL.md"):
        fields = re.match(r"---\nname: (\S+)\ndescription: (.+)\n---\n", skill.read_text(encoding="utf-8"))
        assert fields, skill
        assert fields[1] == skill.parent.name
        assert len(fields[2]) <= 1024


def test_every_picture_is_used_and_described_and_made_by_the_script() -> None:
    made = set(runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"])
    used = {
        (path.parent / target).resolve(): text
        for path in DOCUMENTS
        for text, target in re.findall(r"!\[(.*?)\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
    }
    assert {path.name for path in used} == made == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert all(path.is_file() and len(text) > 30 for path, text in used.items())


def test_a_terminal_recording_is_small_loads_nothing_and_does_not_move_for_readers_who_prefer_reduced_motion() -> None:
    """The recordings are the one in the documents and one made from a minute of a command's output."""
    film = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["film"]
    pieces = [(second / 10, f"\r\x1b[2K\x1b[32mstep\x1b[0m {second} <&>") for second in range(600)]
    for text in (film(pieces), (ROOT / "docs" / "pictures" / "tune.svg").read_text(encoding="utf-8")):
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert len(text.encode()) < 150_000
        assert "@media(prefers-reduced-motion:reduce){*{animation:none!important}}" in text
        assert not re.search(r"<script|href=|url\((?!#)", text)
    assert "step</tspan>" in film(pieces)
    assert "599 &lt;&amp;&gt;" in film(pieces)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_function_that_a_document_names_exists(document: Path) -> None:
    """A name like `perfmodel/map_fit.py: name` is looked up in the repository and in each of its packages."""
    service = ROOT / "service" / "tula_service"
    roots = (
        ROOT,
        ROOT / "service",
        ROOT / "client",
        service,
        ROOT / "agent" / "tula_agent",
        ROOT / "client" / "tula_client",
    )
    named = r"`((?:[a-z]\w+/)+[\w.-]+\.(?:py|sh|json|yaml|md))(?:: (\w+))?`"
    text = document.read_text(encoding="utf-8")
    for path, function in re.findall(named, text):
        found = [root / path for root in roots if (root / path).is_file()]
        assert found, path
        assert not function or re.search(rf"(def|class) {function}\b", found[0].read_text()), f"{path}: {function}"


HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))


def test_the_page_on_the_paper_prints_the_newest_reports() -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert all(page.count(mark) == 1 for mark in HOOKS["MEASURED"])
    assert HOOKS["with_tables"](page) == page, "run python docs/hooks.py"


def test_every_figure_beside_the_papers_claims_stands_in_a_report() -> None:
    """The number in each row of the table must equal the value under the key and in the file that the row names."""
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]*\| `([^`]+)` in `([^`]+)` \|$", page, re.M)
    assert [key for *_, key, _ in rows] == [key for _, key, _ in HOOKS["FIGURES"]]
    for about, printed, key, name in rows:
        value = json.loads((ROOT / name).read_text(encoding="utf-8"))[key]
        number = float(re.sub(r"[^0-9.+-]", "", printed.partition(" (")[0]))
        assert number == pytest.approx(value if "(points)" in about else 100 * value, abs=0.051), key


def test_the_page_on_the_paper_lists_every_equation_and_figure_once() -> None:
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    equations = page.split("\n## Equations\n")[1].split("\n## ")[0]
    figures = page.split("\n## Figures of the paper\n")[1].split("\n## ")[0]
    parts = {1: "abc", 2: "abc", 4: "ab", 7: "ab", 8: "ab"}
    expected = [f"{number}{part}" for number in range(1, 23) for part in parts.get(number, " ")]
    assert re.findall(r"^\| (\d+[abc ])", equations, re.M) == expected
    assert len(expected) == 29
    assert sorted({int(n) for n in re.findall(r"^\| (\d+)[ab]?:", figures, re.M)}) == list(range(1, 12))


@pytest.mark.parametrize("block", [block for block in ALL if block.kind == "toml" and "[model]" in block.body], ids=str)
def test_every_job_specification_is_valid(block: Block) -> None:
    assert JobSpec.model_validate(tomllib.loads(block.body)).name


@pytest.mark.parametrize("document", RUN, ids=lambda path: path.name)
def test_the_commands_and_programs_of_a_document_print_what_it_states(
    document: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue("server")
    run = [block for block in blocks(document) if not block.mark or block.mark[0] == "save as"]
    typed = [block for block in run if block.kind in ("console", "bash")]
    for block in run:
        if block.mark:
            (tmp_path / block.mark[1]).write_text(block.body)
    if typed:
        asked = any("$DATABASE" in block.body for block in typed)
        check_shell(typed, server, tmp_path, request.getfixturevalue("two_databases") if asked else {})
    programs = [block.body for block in run if block.kind == "python" and not block.mark]
    if programs:
        check_programs(document, programs, server, tmp_path)


def check_shell(typed: list[Block], server: Server, folder: Path, databases: dict[str, str]) -> None:
    """Run all console and bash blocks of a document in one shell, as a reader would type them."""
    script = ['exec 2>&1 </dev/null; PATH="${PG_BIN:+$PG_BIN:}$PATH"\n', stand_ins(folder)]
    expected: list[tuple[Block, str | None]] = []
    for block in typed:
        whole = [(f"( set -e\n{block.body}echo DONE )", None)]  # `&&` would switch `set -e` off
        for command, output in commands(block.body) if block.kind == "console" else whole:
            command = command.replace("http://127.0.0.1:8321", server.url)
            script.append(f"{command}\nprintf '\\n\\036\\n'\n")
            expected.append((block, output))
    (folder / "typed.sh").write_text("".join(script))
    done = subprocess.run(
        ["bash", "typed.sh"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(server, folder) | databases,
        timeout=240,
        check=False,
    )
    printed = done.stdout.split("\n\036\n")[:-1]
    assert len(printed) == len(expected), done.stdout + done.stderr
    for (block, wanted), got in zip(expected, printed, strict=True):
        if wanted is None:
            assert got.endswith("DONE\n"), f"{block}: it ends with\n{got}"
        else:
            got = re.sub(r" +$", "", got.strip(), flags=re.MULTILINE)  # a table pads its last column
            assert pattern(wanted).fullmatch(got), f"{block}: it says\n{wanted}\nbut it prints\n{got}"


def stand_ins(folder: Path) -> str:
    """Put launchers, a script and a job into the folder; return the shell functions that these need."""
    for name in LAUNCHERS:
        program = folder / name if name.startswith("./") else folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/support/stand_in.py"\n')
        program.chmod(0o755)
    if (folder / "job.toml").exists():
        return ""
    (folder / "job.toml").write_text(JOB)
    return OTHER_JOB


def commands(body: str) -> Iterator[tuple[str, str]]:
    """Yield (command, output) of a console block; lines after `> ` continue a command."""
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
    """Return a pattern for an example's output in which ids, times, measured numbers and `...` match other texts."""
    parts = []
    for part in wanted.split("..."):
        last, made = 0, ""
        for found in VARYING.finditer(part):
            made += re.escape(part[last : found.start()]) + r"[\w.:-]+"
            last = found.end()
        parts.append(made + re.escape(part[last:]))
    return re.compile(".*".join(parts), re.DOTALL)


def check_programs(document: Path, programs: list[str], server: Server, folder: Path) -> None:
    """Run all Python blocks of a document in one forked process, each in a separate namespace."""
    runner = folder / "run_blocks.py"
    runner.write_text(
        "import json, sys\n"
        "for number, source in enumerate(json.load(open(sys.argv[1])), 1):\n"
        "    exec(compile(source, f'block {number}', 'exec'), {'__name__': '__main__'})\n"
    )
    (folder / "blocks.json").write_text(json.dumps(programs))
    done = subprocess.run(
        [str(launchers() / "python"), str(runner), str(folder / "blocks.json")],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(server, folder),
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{document.name}: {done.stderr}"


@functools.cache
def forked_command() -> Path:
    """Return a folder with a `tula` that is forked, since documents run it a hundred times."""
    return programs(fork_server(), {"tula": ["-m", "tula_client.cli"]})


def environment(server: Server, folder: Path) -> dict[str, str]:
    places = [folder / "bin", forked_command(), Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, places), os.environ["PATH"]])
    # One rank, so that blocks which set up torch.distributed find a rendezvous.
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return clean_environment(**ranks, PATH=path, TULA_URL=server.url)


def assert_changes_the_example(block: Block) -> None:
    """Assert that a diff adds exactly the marked lines to the example."""
    source = (ROOT / "examples" / "digits_ddp.py").read_text().splitlines()
    after = [line.removesuffix("  # tula").rstrip() for line in source]
    added = {line.removesuffix("  # tula").rstrip() for line in source if line.endswith("  # tula")}
    for hunk in re.split(r"^@@.*$\n", block.body, flags=re.MULTILINE):
        lines = hunk.rstrip("\n").splitlines()
        typed = [line[1:].rstrip() for line in lines if not line.startswith("-")]
        assert any(after[at : at + len(typed)] == typed for at in range(len(after))), f"{block}: not in the example"
        marked = {line[1:].rstrip() for line in lines if line.startswith("+")} - {""}
        assert marked <= added, f"{block}: {marked - added} is not marked in the example"


@pytest.mark.parametrize(("document", "test"), ELSEWHERE.items())
def test_a_document_that_another_test_runs_is_named_in_that_test(document: str, test: str) -> None:
    assert Path(document).name in (ROOT / test).read_text()
