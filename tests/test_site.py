"""The documents build as a site, with every link and anchor checked, and load nothing from another host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tula_client import Client
from tula_wire import routes

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; any warning (a dead link, a page outside of the navigation) fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_and_asks_no_other_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 12
    for page in pages:
        loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="(https?://[^"]+)"', page.read_text())
        outside = [each for each in loaded if "rel=canonical" not in each]
        assert outside == [], page


def test_the_reference_lists_every_route(site: Path) -> None:
    page = (site / "api" / "http" / "index.html").read_text(encoding="utf-8")
    for name in filter(str.isupper, vars(routes)):
        path = getattr(routes, name)
        assert path in page, f"{name} ({path}) is missing"


def test_the_reference_describes_the_public_face(site: Path) -> None:
    page = (site / "api" / "python" / "index.html").read_text(encoding="utf-8")
    for name in ("Client", "JobHandle", "init", "TulaOptimizer", "JobSpec", "Recommendation"):
        assert re.search(rf'id="tula_\w+\.{name}"', page), name


def test_the_reference_lists_every_call_of_the_client(site: Path) -> None:
    page = (site / "api" / "python" / "index.html").read_text(encoding="utf-8")
    calls = {name for kind in Client.__mro__ for name, member in vars(kind).items() if hasattr(member, "build")}
    assert {"job", "register", "ready"} <= calls
    for name in calls:
        assert re.search(rf"<td><code>{name}\(", page), name
