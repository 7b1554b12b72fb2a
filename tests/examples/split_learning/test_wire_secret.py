"""The shared secret: where it comes from, what is too weak, and that it shows itself nowhere."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import logging
import os
import pickle
from pathlib import Path

import pytest
from split_learning.wire import (
    NO_AUTHENTICATION,
    Secret,
    SecretError,
    Server,
    add_secret_options,
    chosen_secret,
    connect,
    load_secret,
)
from split_learning.wire.authentication import Seal, is_nonce, new_nonce

TEXT = "0123456789abcdef" * 4
VARIABLE = "LQ_SPLIT_LEARNING_SECRET"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "secret.txt"
    path.write_text(text)
    path.chmod(mode)
    return path


def keys(secret: Secret) -> tuple[bytes, bytes]:
    return secret.session_keys(b"transcript")


def test_a_file_and_the_variable_give_the_same_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, f"  {TEXT}\r\n\n")
    monkeypatch.setenv(VARIABLE, TEXT + "\n")
    assert keys(load_secret(path)) == keys(load_secret()) == keys(Secret(TEXT.encode()))
    path.write_text(TEXT[::-1])
    assert keys(load_secret(path)) != keys(load_secret())  # the file that is named counts


def test_session_keys_are_those_of_the_protocol() -> None:
    session = hmac.digest(
        TEXT.encode(), b"lq split learning" + hashlib.sha256(b"transcript").digest(), "sha256"
    )
    to_server, to_client = keys(Secret(TEXT.encode()))
    assert to_server == hmac.digest(session, b"client to server", "sha256")
    assert to_client == hmac.digest(session, b"server to client", "sha256")


@pytest.mark.parametrize("text", ["", " \n", "short", TEXT[:31], "abcdefg" * 9])
def test_weak_secrets_are_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SecretError, match="token_hex"):
        load_secret(written(tmp_path, text))
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(SecretError, match="token_hex"):
        load_secret()


def test_no_secret_is_an_error_that_names_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SecretError, match=f"--secret-file.*{VARIABLE}.*--no-authentication"):
        load_secret()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, TEXT, mode)
    with pytest.raises(SecretError, match=f"chmod 600 {path}"):
        load_secret(path)


def test_files_that_are_no_secret_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="cannot be read"):
        load_secret(tmp_path / "none")
    with pytest.raises(SecretError, match="cannot be read"):
        load_secret(tmp_path)
    with pytest.raises(SecretError, match="more than 4096 bytes"):
        load_secret(written(tmp_path, TEXT * 65))


def test_a_secret_is_neither_shown_nor_pickled() -> None:
    secret = Secret(TEXT.encode())
    assert TEXT not in f"{secret!r} {secret}"
    assert not hasattr(secret, "__dict__")
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)


def test_options_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_secret_options(parser)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SecretError):
        chosen_secret(parser.parse_args([]))
    assert chosen_secret(parser.parse_args(["--no-authentication"])) is NO_AUTHENTICATION
    path = str(written(tmp_path, TEXT))
    chosen = chosen_secret(parser.parse_args(["--secret-file", path]))
    assert isinstance(chosen, Secret)
    monkeypatch.setenv(VARIABLE, TEXT)
    assert isinstance(chosen_secret(parser.parse_args([])), Secret)
    with pytest.raises(SystemExit):
        parser.parse_args(["--secret-file", path, "--no-authentication"])


@pytest.mark.parametrize("secret", [None, "", TEXT, TEXT.encode()])
def test_going_without_has_to_be_said(secret: object) -> None:
    with pytest.raises(SecretError, match="load_secret.*NO_AUTHENTICATION"):
        Server(("127.0.0.1", 0), secret, lambda connection: None)  # type: ignore[arg-type]
    with pytest.raises(SecretError, match="load_secret.*NO_AUTHENTICATION"):
        connect(("127.0.0.1", 9), secret)  # type: ignore[arg-type]


def test_nonces_are_fresh_and_checked() -> None:
    assert is_nonce(new_nonce())
    assert len({new_nonce() for _ in range(100)}) == 100
    for wrong in (None, 7, "", "0" * 63, "0" * 65, "0" * 63 + "g", "A" * 64, ["0"] * 64):
        assert not is_nonce(wrong)


def test_tags_compare_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(1) or real(a, b))
    running = Seal(b"k" * 32).start()
    running.update(b"abc")
    running.check(hmac.digest(b"k" * 32, b"abc", "sha256"))
    assert compared


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("secret", [Secret(TEXT.encode()), NO_AUTHENTICATION])
def test_a_server_warns_of_what_is_not_protected(
    host: str, secret: Secret, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "split_learning.wire"):
        Server((host, 0), secret, lambda connection: None).stop()
    assert ("not encrypted" in caplog.text) == (host == "0.0.0.0")
    assert all(name in caplog.text for name in ("ssh -L", "WireGuard")) == (host == "0.0.0.0")
    assert ("No authentication" in caplog.text) == (secret is NO_AUTHENTICATION)
    assert os.environ.get(VARIABLE, TEXT) not in caplog.text
