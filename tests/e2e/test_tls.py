"""Tests client and agents with a TLS proxy: they check the certificate, and report why they reject one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.support.forked import Server
from tests.e2e.command import ALONE, BATCH, Tula
from tests.support.tls import certificate, proxy
from tula_client import Client


@pytest.fixture
def behind_tls(server: Server, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield the https address, and the certificate of the authority that signed the proxy's certificate."""
    authority, pair = certificate(tmp_path)
    with proxy(pair, urlsplit(server.url).port or 0) as url:
        yield url, str(authority)


def test_a_job_is_tuned_over_tls(server: Server, tmp_path: Path, behind_tls: tuple[str, str]) -> None:
    url, authority = behind_tls
    tula = Tula(server, tmp_path, forked=True, TULA_URL=url, SSL_CERT_FILE=authority)
    tuned, said = tula("tune", tula.spec("over-tls", nodes=1), *ALONE, *BATCH)
    with Client(server.url) as client:
        (run,) = client.handle("over-tls").runs()
    assert (run.state, run.num_samples >= 8) == ("succeeded", True), said
    assert tuned["recommendation"]["basis"] == "profiled"


def test_an_unknown_authority_is_one_sentence(server: Server, tmp_path: Path, behind_tls: tuple[str, str]) -> None:
    url, _ = behind_tls
    _, said = Tula(server, tmp_path, TULA_URL=url)("jobs", "list", fails=True)
    assert said.count("\n") == 1
    assert "certificate" in said
    assert "SSL_CERT_FILE" in said
