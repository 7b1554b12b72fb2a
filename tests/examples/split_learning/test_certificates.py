"""Who is let in: certificates of another authority, of another role, revoked, or none at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from lq_testing import split_runs
from lq_testing.split_runs import PATIENT, answering, certificates
from split_learning import certificates as program
from split_learning.wire.client import connect
from split_learning.wire.common import (
    AuthenticationFailed,
    CertificateError,
    PeerLost,
    WireError,
    show_address,
)
from split_learning.wire.identity import NO_AUTHENTICATION, Identity, Revoked, load_identity
from split_learning.wire.messages import Message
from split_learning.wire.server import Server

TINY = {"model": "tiny"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program.main([str(tmp_path), "alice", "bob"])
    return tmp_path


def identity(folder: Path, name: str) -> Identity:
    return load_identity(folder / f"{name}.pem", "server" if name == "server" else "client")


def mixed(own: Identity, authority: Identity) -> Identity:
    """Return an identity that trusts another authority than its own."""
    return Identity(own.name, own.own, authority.authority)


def test_strangers_of_all_kinds_are_refused(folder: Path) -> None:
    alice, eve = split_runs.identity("alice"), identity(folder, "alice")
    server = split_runs.identity("server")
    with answering() as running:
        for who, error in (
            (eve, AuthenticationFailed),  # it does not know the server, either
            (mixed(eve, alice), PeerLost),  # the server ends the connection
            (mixed(server, alice), PeerLost),  # good for a server alone
            (NO_AUTHENTICATION, PeerLost),
        ):
            with pytest.raises(error, match="of one authority"):
                connect(running.address, who, TINY, deadlines=PATIENT)
        anonymous = grpc.ssl_channel_credentials(alice.authority)
        options = [("grpc.ssl_target_name_override", program.SERVER_NAME)]
        with grpc.secure_channel(show_address(running.address), anonymous, options) as channel:
            call = channel.stream_stream("/lq.SplitLearning/Connect")(iter([]))
            with pytest.raises(grpc.RpcError):
                next(call)
        connect(running.address, alice, TINY, deadlines=PATIENT).close()


@pytest.mark.parametrize("poser", ["client", "foreign server", "without TLS"])
def test_a_client_talks_to_no_other_server(poser: str, folder: Path) -> None:
    alice, bob = (split_runs.identity(name) for name in ("alice", "bob"))
    foreign = identity(folder, "server")
    posing = {"client": bob, "foreign server": foreign, "without TLS": None}[poser]
    with (
        answering(identity=posing) as running,
        pytest.raises(AuthenticationFailed, match="is not the server of this client's"),
    ):
        connect(running.address, alice, TINY, deadlines=PATIENT)


# gRPC reads the setting when it is first used, which other tests of this process may have done.
OLD_TLS = """
import socket, ssl, sys
from pathlib import Path
from unittest.mock import MagicMock

for slow in ("lq_lightning", "torch", "safetensors", "safetensors.torch"):
    sys.modules[slow] = MagicMock(__version__="0")
sys.path.insert(0, sys.argv[1])
from split_learning.wire.identity import Revoked, load_identity
from split_learning.wire.server import Server

folder = Path(sys.argv[2])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.load_verify_locations(folder / "authority.pem")
context.load_cert_chain(folder / "alice.pem")
context.set_alpn_protocols(["h2"])
identity = load_identity(folder / "server.pem", "server")
revoked = Revoked(folder / "revoked.txt")
with Server(("127.0.0.1", 0), identity, lambda: iter, revoked=revoked) as server:
    for newest in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        context.maximum_version = newest
        with socket.create_connection(server.address) as plain:
            try:
                secure = context.wrap_socket(plain, server_hostname="server.split-learning.invalid")
                print(secure.version())
            except ssl.SSLError:
                print("refused")
"""


def test_older_versions_of_tls_are_refused(examples: Path) -> None:
    command = [sys.executable, "-c", OLD_TLS, str(examples), str(certificates())]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.split() == ["TLSv1.3", "refused"]


def test_a_revoked_client_is_refused_at_once_and_others_are_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alice, bob = identity(folder, "alice"), identity(folder, "bob")
    caplog.set_level("INFO")
    revoked = Revoked(folder / "revoked.txt")
    with answering(identity=identity(folder, "server"), revoked=revoked) as running:
        with connect(running.address, bob, {**TINY}, deadlines=PATIENT) as connected:
            program.main([str(folder), "bob", "--revoke"])
            connected.send(Message("batch"))
            with pytest.raises(AuthenticationFailed, match="certificate [0-9a-f]{64} was revoked"):
                connected.receive()
        with pytest.raises(AuthenticationFailed, match="was revoked"):
            connect(running.address, bob, TINY, deadlines=PATIENT)
        with connect(running.address, alice, TINY, deadlines=PATIENT) as connected:
            (folder / "revoked.txt").unlink()
            connected.send(Message("batch"))
            with pytest.raises(AuthenticationFailed, match="cannot read its list"):
                connected.receive()
    # Names are those of certificates: there is nothing else that a client says of itself.
    assert caplog.text.count("bob (127.0.0.1:") == 2
    assert "alice (127.0.0.1:" in caplog.text


def test_lists_of_other_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="cannot be read"):
        Revoked(tmp_path / "revoked.txt")
    (tmp_path / "revoked.txt").write_text("# none\nbob\n")
    with pytest.raises(CertificateError, match="'bob', which is no fingerprint"):
        Revoked(tmp_path / "revoked.txt")
    with pytest.raises(ValueError, match="needs a list of revoked"):
        Server(("127.0.0.1", 0), split_runs.identity("server"), lambda: iter)


def test_files_are_checked_before_they_are_used(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        *("authority.pem", "server.pem", "alice.pem", "bob.pem", "revoked.txt")
    }
    alice = folder / "alice.pem"
    assert load_identity(alice, "client").name == "alice"
    assert "BEGIN" not in repr(load_identity(alice, "client"))
    for name, role in (("alice", "server"), ("server", "client")):
        with pytest.raises(CertificateError, match=f"cannot be used by a {role}"):
            load_identity(folder / f"{name}.pem", role)  # type: ignore[arg-type]
    for broken in ("authority.pem", "revoked.txt"):
        os.chmod(folder / broken, 0o600)
        with pytest.raises(CertificateError, match=r"no file of `certificates\.py`"):
            load_identity(folder / broken, "client")
    with pytest.raises(CertificateError, match="cannot be read: .*No such file"):
        load_identity(folder / "carol.pem", "client")
    alice.chmod(0o640)
    with pytest.raises(CertificateError, match=r"mode 640.*chmod 600"):
        load_identity(alice, "client")
    program.main([str(folder), "dave", "--days", "-0.002"])
    with pytest.raises(CertificateError, match="expired on"):
        load_identity(folder / "dave.pem", "client")


def test_the_command_keeps_what_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    program.main([str(folder), "carol"])
    assert "carol.pem" in capsys.readouterr().out
    assert all(path.read_bytes() == content for path, content in before.items())
    assert identity(folder, "carol").authority == identity(folder, "alice").authority
    for names, text in (
        (["alice"], "exists"),
        (["server"], "cannot be a client's name"),
        (["authority"], "cannot be a client's name"),
        (["../x"], "cannot be a client's name"),
        (["nobody", "--revoke"], "There is no certificate"),
    ):
        with pytest.raises(CertificateError, match=text):
            program.main([str(folder), *names])


def test_expired_certificates_are_refused_by_tls(folder: Path) -> None:
    program.make_certificates(folder, ["late"], days=-0.002)
    alice, server = identity(folder, "alice"), identity(folder, "server")
    late = Identity("late", (folder / "late.pem").read_bytes(), alice.authority)
    with answering(identity=server) as running:
        with pytest.raises(WireError, match="of one authority"):
            connect(running.address, late, TINY, deadlines=PATIENT)
        connect(running.address, alice, TINY, deadlines=PATIENT).close()


@pytest.mark.parametrize("package", ["grpc", "cryptography"])
def test_a_missing_package_is_named_with_a_remedy(package: str) -> None:
    script = (
        f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = ['', '-h']; "
        f"runpy.run_path({program.__file__!r}, run_name='__main__')"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"the package `{package}`" in found.stderr
    assert "pip install '.[examples,hf]'" in found.stderr


def test_a_new_folder_is_ignored_by_git_and_an_old_one_left_alone(tmp_path: Path) -> None:
    program.main([str(tmp_path / "new"), "alice"])
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    program.main([str(tmp_path), "alice"])
    assert not (tmp_path / ".gitignore").exists()
