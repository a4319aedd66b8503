"""Banned words and phrases stay out of identifiers, docstrings, comments, messages and documents.

`python -m tests.test_words FOLDER...` lists each place that breaks a rule.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("client", "agent", "service", "migrations")
CHECKED = (*PRODUCT, "benchmarks", "experiments", "examples", "tests")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "docs", "deploy", "docker-compose.yml")

WORDS = {
    "later", "shown", "news", "settle", "settles", "settled", "alike", "together", "weakly", "passes", "here", "told",
    "tell", "tells", "teller", "tellers", "whoever", "nobody", "anew",
}  # fmt: skip
"""Words that may not be part of an identifier: a standard term names the same thing."""
PHRASES = re.compile(
    r"\b(told|whoever|nobody|anew|of\s+(its|their)\s+own|(go|goes|going|gone|went)\s+on\s+from|as\s+(it|they)\s+lies?"
    r"|(what|that)\s+there\s+is)\b",
    re.IGNORECASE,
)
"""Phrases that stand in no docstring, comment, message or document."""
SUFFIXES = (".py", ".md", ".html", ".js", ".css", ".toml", ".yml", ".yaml", ".sh")
VAGUE = re.compile(r"test_(nor|but|and|what(?!_if))_")
"""Beginnings of a test's name that need the test before it to be understood."""


class Place(NamedTuple):
    """One place that breaks the rule."""

    path: Path
    line: int
    found: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.found}"


def parts(identifier: str) -> set[str]:
    """The words of an identifier, split at underscores and camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a file gives: classes, functions, arguments, variables, attributes, imports under another name."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg() | ast.keyword():
                yield node.lineno, node.arg or ""
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias() if node.asname:
                yield node.lineno, node.asname


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments and string literals, f-strings included, line by line."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def phrases(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Phrases of a text that may wrap over lines, with the line where each begins."""
    for match in PHRASES.finditer(text):
        yield line + text.count("\n", 0, match.start()), " ".join(match[0].split())


def places(path: Path) -> Iterator[Place]:
    """Where a Python file breaks a rule."""
    source = path.read_text(encoding="utf-8")
    for word in sorted(parts(path.stem) & WORDS):
        yield Place(path, 1, f"module name: {word}")
    for line, name in identifiers(ast.parse(source)):
        for word in sorted(parts(name) & WORDS):
            yield Place(path, line, f"name {name}: {word}")
        if name.startswith("test_") and (vague := VAGUE.match(name)):
            yield Place(path, line, f"name {name}: begins with {vague[0]}")
    if path != Path(__file__):
        for line, text in texts(source):
            for at, phrase in phrases(text, line):
                yield Place(path, at, f"text: {phrase!r}")


def document_places(path: Path) -> Iterator[Place]:
    """Where a document breaks a rule."""
    for line, phrase in phrases(path.read_text(encoding="utf-8"), 1):
        yield Place(path, line, f"text: {phrase!r}")


def files(*folders: str) -> list[Path]:
    """Python files and documents in these folders; a name of a file is itself."""
    found = []
    for folder in map(ROOT.joinpath, folders):
        found += [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.suffix in SUFFIXES]
    return sorted(path for path in found if "results" not in path.parts)


def check(paths: list[Path]) -> list[Place]:
    """Every place in these files."""
    return [place for path in paths for place in (places(path) if path.suffix == ".py" else document_places(path))]


@pytest.mark.parametrize(
    ("identifier", "words"),
    [
        ("snake_case_name", {"snake", "case", "name"}),
        ("HTTPServerTeller", {"http", "server", "teller"}),
        ("_TOLD", {"told"}),
        ("heresy", {"heresy"}),
    ],
)
def test_an_identifier_is_split_at_underscores_and_camel_case(identifier: str, words: set[str]) -> None:
    assert parts(identifier) == words


def test_the_check_finds_names_arguments_attributes_comments_and_wrapped_phrases(tmp_path: Path) -> None:
    source = '''"""Goes on
    from the last."""
def test_nor_f(told, *, x):
    self.news = x  # anew
    g(later=f"nobody {x}")
'''
    path = tmp_path / "shown.py"
    path.write_text(source)
    assert sorted((place.line, place.found) for place in places(path)) == [
        (1, "module name: shown"),
        (1, "text: 'Goes on from'"),
        (3, "name test_nor_f: begins with test_nor_"),
        (3, "name told: told"),
        (4, "name news: news"),
        (4, "text: 'anew'"),
        (5, "name later: later"),
        (5, "text: 'nobody'"),
    ]


@pytest.mark.parametrize("folder", [*CHECKED, *DOCUMENTS])
def test_no_name_comment_message_or_document_uses_a_banned_word(folder: str) -> None:
    assert [str(place) for place in check(files(folder))] == []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.test_words", description=__doc__)
    parser.add_argument("folders", nargs="*", default=[*CHECKED, *DOCUMENTS])
    found = check(files(*parser.parse_args().folders))
    print(*found, sep="\n")
    print(f"{len(found)} places", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
