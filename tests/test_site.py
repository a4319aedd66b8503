"""Tests that every page of the built site exists as HTML for people and as Markdown, listed in `llms.txt`, for LLMs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)[^)]*\)")
"""The target of a link within the site."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as CI does, with warnings as errors; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_as_html_and_as_markdown_with_what_the_hooks_fill_in(site: Path) -> None:
    for page in PAGES:
        directory = page.parent if page.stem == "index" else page.with_suffix("")
        assert (site / directory / "index.html").is_file(), page
        text = (site / page).read_text(encoding="utf-8")
        assert text.startswith("# "), page
        assert "<!-- openapi -->" not in text, page
    assert "`POST /v1/jobs`" in (site / "api" / "http.md").read_text(encoding="utf-8")


def test_every_link_of_a_page_in_markdown_leads_to_a_file_of_the_site(site: Path) -> None:
    for page in PAGES:
        links = LINK.findall((site / page).read_text(encoding="utf-8"))
        assert [link for link in links if not (site / page.parent / link).exists()] == [], page


def test_llms_txt_lists_every_page_of_the_navigation_with_its_first_sentence(site: Path) -> None:
    title, _, *lines = (site / "llms.txt").read_text(encoding="utf-8").splitlines()
    assert (title, lines[0]) == ("# Tula", "> How many nodes, and which global batch size?")
    listed = [match.groups() for line in lines if (match := re.fullmatch(r"- \[(.+)\]\((.+)\)(?:: (.+))?", line))]
    assert [line for line in lines[1:] if line and not line.startswith(("- [", "## "))] == []
    assert sorted(target for _, target, _ in listed) == sorted(page.as_posix() for page in PAGES)
    said = {target: sentence for _, target, sentence in listed}
    assert said["commands.md"] == "Every command has `--help`; commands with a result have `--json`."
    assert sum(sentence is not None for sentence in said.values()) > 0.8 * len(said)
