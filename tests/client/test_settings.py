"""Tests where the address and token are read from (argument, environment, `.env`, file), and when no token is sent."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

from tula_client import DEFAULT_URL, TulaError
from tula_client._settings import access, config_path, package_version
from tula_client.cli.app import run


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables, and use an empty working directory and a config folder without a file."""
    for name in ("TULA_URL", "TULA_TOKEN"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def config(text: str, mode: int = 0o600) -> Path:
    return write(config_path(), text, mode)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_place_goes_before_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert access() == access(token="") != access("http://a")
    assert (access().url, access().origin) == (DEFAULT_URL, "default")
    file = config('url = "http://config/"\ntoken = "secret"\n')
    assert file == tmp_path / "config" / "tula" / "config.toml"
    assert (access().url, access().token, access().origin) == ("http://config", "secret", str(file))
    dotenv = write(Path(".env").absolute(), "# ours\nOTHER=1\nexport TULA_URL='http://dotenv'\nTULA_TOKEN=hidden\n")
    assert (access().url, access().token, access().origin) == ("http://dotenv", "hidden", str(dotenv))
    monkeypatch.setenv("TULA_URL", "http://environment")
    monkeypatch.setenv("TULA_TOKEN", "variable")
    assert (access().url, access().token, access().origin) == ("http://environment", "variable", "TULA_URL")
    assert (access("http://b", "mine").url, access("http://b", "mine").token) == ("http://b", "mine")
    assert access(token="").token == ""


def test_a_files_token_goes_to_the_address_of_that_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config('url = "http://config"\ntoken = "secret"\n')
    assert access("http://elsewhere").token == ""
    assert access("http://config/").token == "secret"
    write(Path(".env"), "TULA_URL=http://elsewhere\n")
    assert (access().url, access().token) == ("http://elsewhere", "")
    monkeypatch.setenv("TULA_URL", "http://config")
    assert access().token == "secret"
    write(Path(".env"), "TULA_TOKEN=hidden\n")
    assert access().token == "secret"
    monkeypatch.delenv("TULA_URL")
    config("")
    assert (access().url, access().token) == (DEFAULT_URL, "hidden")


def test_no_downloaded_folder_leads_the_token_of_the_environment_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TULA_URL, TULA_TOKEN applies only to the default address and to an address that the user types."""
    monkeypatch.setenv("TULA_TOKEN", "variable")
    assert (access().url, access().token) == (DEFAULT_URL, "variable")
    assert access("http://by-hand").token == "variable"
    write(Path(".env"), "TULA_URL=http://evil\n")
    assert (access().url, access().token) == ("http://evil", "")


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_token_that_others_can_read_is_refused(mode: int) -> None:
    file = config('url = "http://config"\ntoken = "secret"\n', mode)
    with pytest.raises(TulaError, match=f"chmod 600 {file}"):
        access()
    assert access("http://elsewhere").token == ""  # it is not used
    write(Path(".env"), "TULA_TOKEN=hidden\n", mode)
    with pytest.raises(TulaError, match="contains a token"):
        access()
    write(Path(".env"), "TULA_URL=http://open\n", mode)
    assert access().url == "http://open"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("url = ", "not valid TOML"),
        ('adress = "http://x"', "adress"),
        ("url = 5", "url cannot be used"),
        ('token = "t"', "sets token but not url"),
        ('url = "ftp://x"', "not an HTTP address"),
        ('url = "http://x"\ntoken = "a b"', "copy the token again"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_named(text: str, said: str) -> None:
    file = config(text)
    with pytest.raises(TulaError, match=said) as raised:
        access()
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_dotenv_that_is_no_file_is_passed_over() -> None:
    Path(".env").mkdir()
    assert access().origin == "default"


@pytest.mark.slow  # the command imports torch
def test_the_command_hands_both_to_what_it_starts(capfd: pytest.CaptureFixture[str]) -> None:
    """The agent in a launched training process reads only the environment."""
    file = config('url = "http://127.0.0.1:9"\ntoken = "secret"\n')
    assert run(["doctor", "--json"]) == 1
    assert f"http://127.0.0.1:9 (from {file}) does not respond" in capfd.readouterr().out
    assert (os.environ["TULA_URL"], os.environ["TULA_TOKEN"]) == ("http://127.0.0.1:9", "secret")


def test_the_command_refuses_an_open_token_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    config('url = "http://127.0.0.1:9"\ntoken = "secret"\n', 0o644)
    assert run(["jobs", "list"]) == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_a_source_tree_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert package_version() == metadata.version("tula")
    monkeypatch.setattr("sys.path", [])
    assert package_version() == "0.0.0"


def test_a_byte_order_mark_hides_neither_the_address_nor_the_file_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TULA_URL", raising=False)
    (tmp_path / ".env").write_text("TULA_URL=http://elsewhere:1\r\n", encoding="utf-8-sig")
    assert access().url == "http://elsewhere:1"
    monkeypatch.setenv("TULA_URL", "\ufeffhttp://from-the-environment:1")
    assert access().url == "http://from-the-environment:1"
