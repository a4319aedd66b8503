"""Tests where each setting of the service is read from, and the message about an invalid one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tula_service.settings import Settings, SettingsError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the working directory; return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_place_that_has_a_value_gives_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.read().database == "tula.db"
    (folder / ".env").write_text("TULA_DATABASE=of-a-downloaded-folder.db\n")
    assert Settings.read(host=None).database == "tula.db", "only the client reads such a file"
    monkeypatch.setenv("TULA_DATABASE", "environment.db")
    assert Settings.read().database == "environment.db"
    found = Settings.read(database="flag.db", port=0)
    assert (found.database, found.port) == ("flag.db", 0)


def test_an_empty_or_unknown_variable_is_ignored_and_workers_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TULA_PORT", "")
    monkeypatch.setenv("TULA_COLOUR", "red")
    found = Settings.read(workers=2, trace=True)
    assert found.port == 8321
    for name, value in found.to_environment().items():
        monkeypatch.setenv(name, value)
    assert Settings.read() == found


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LOG_FORMAT", "xml", "must be one of 'auto', 'json' or 'text'."),
        ("PORT", "65536", "must be at most 65535; give a smaller value."),
        ("WORKERS", "0", "must be at least 1; give a larger value."),
        ("THREADS", "many", "must be a whole number."),
        ("RETENTION_DAYS", "long", "must be a number."),
        ("RETENTION_DAYS", "nan", "must be at least 0.0; give a larger value."),
        ("TRACE", "maybe", "must be 1 or 0."),
    ],
)
def test_a_value_that_is_wrong_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"TULA_{name}", value)
    with pytest.raises(SettingsError) as raised:
        Settings.read()
    assert str(raised.value) == f"TULA_{name} {said}"
