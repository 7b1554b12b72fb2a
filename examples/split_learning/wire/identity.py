"""Certificates as the two programs read them: who this machine is, and whom it trusts."""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from .common import AuthenticationFailed, CertificateError

# The name in the server's certificate, whatever its address: no client's certificate has it.
SERVER_NAME = "server.split-learning.invalid"
REVOKED_FILE = "revoked.txt"
_MAKE_ONE = (
    "Make one with `python examples/split_learning/certificates.py FOLDER NAME` and give each "
    "machine its own file."
)


@dataclass(frozen=True, slots=True)
class Identity:
    """A machine's own certificate, and the authority that both sides trust.

    Attributes:
        name: Name in the certificate.
        own: Private key and certificate, PEM; shown in no log.
        authority: Certificate of the only authority that may sign the other side's, PEM.
    """

    name: str
    own: bytes = field(repr=False)
    authority: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return TLS credentials that let in clients of the authority alone."""
        return grpc.ssl_server_credentials([(self.own, self.own)], self.authority, True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return TLS credentials of a client that trusts the authority alone."""
        return grpc.ssl_channel_credentials(self.authority, self.own, self.own)


# Takes the place of an identity: no TLS, and whoever reaches the port is served.
NO_AUTHENTICATION = None


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 fingerprint of the first certificate in PEM text, as hex digits."""
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def load_identity(path: str | Path, role: Literal["server", "client"]) -> Identity:
    """Return the identity in a file of ``certificates.py``.

    Raises:
        CertificateError: the file is missing, readable by others, of another form, expired, or of
            the other side.
    """
    path = Path(path).expanduser()
    content = _read(path)
    try:
        own, authority = x509.load_pem_x509_certificates(content)
        name = str(own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        hosts = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError, IndexError, x509.ExtensionNotFound) as error:
        raise CertificateError(f"{path} is no file of `certificates.py`. {_MAKE_ONE}") from error
    if own.not_valid_after_utc < datetime.now(timezone.utc):
        raise CertificateError(
            f"The certificate in {path} expired on {own.not_valid_after_utc:%Y-%m-%d}. Remove "
            "it from the authority's folder and run `certificates.py FOLDER NAME` there, which "
            "also makes a missing server.pem."
        )
    if (SERVER_NAME in hosts.get_values_for_type(x509.DNSName)) != (role == "server"):
        raise CertificateError(f"{path} belongs to {name!r}, which cannot be used by a {role}.")
    return Identity(name, content, authority.public_bytes(serialization.Encoding.PEM))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(64 * 1024)
    except OSError as error:
        raise CertificateError(f"The certificate cannot be read: {error}. {_MAKE_ONE}") from error
    if os.name == "posix" and stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise CertificateError(
            f"Other users may read or change the private key in {path} (mode "
            f"{stat.S_IMODE(mode):o}). Run `chmod 600 {path}`; if others have seen it, revoke it "
            "and make a new one."
        )
    return content


class Revoked:
    """The list of revoked certificates: a file of SHA-256 fingerprints, read when it has changed.

    Args:
        path: Path of the file; text after ``#`` is a comment.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).expanduser()
        self._state: tuple[int, int, int] | None = None
        self._prints: frozenset[str] = frozenset()
        self._refresh()

    def check(self, auth_context: Mapping[str, list[bytes]]) -> str:
        """Return the name of a client, read from its certificate."""
        certificates = auth_context.get("x509_pem_cert", [])
        names = auth_context.get("x509_common_name", [])
        if len(certificates) != 1 or len(names) != 1:
            raise AuthenticationFailed("The client has no certificate.")
        self._refresh()
        if (digest := fingerprint(certificates[0])) in self._prints:
            raise AuthenticationFailed(f"The client's certificate {digest} was revoked.")
        return names[0].decode(errors="replace")

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            state = (status.st_mtime_ns, status.st_size, status.st_ino)
            if state == self._state:
                return
            lines = self._path.read_text().splitlines()
        except (OSError, ValueError) as error:
            raise CertificateError(
                f"The list of revoked certificates cannot be read: {error}. Copy {REVOKED_FILE} "
                "beside the server's certificate, or name it with `--revoked`."
            ) from error
        entries = [line.partition("#")[0].replace(":", "").strip().lower() for line in lines]
        if wrong := [entry for entry in entries if not re.fullmatch(r"([0-9a-f]{64})?", entry)]:
            raise CertificateError(f"{self._path} has {wrong[0]!r:.80}, which is no fingerprint.")
        self._prints, self._state = frozenset(entries), state


def add_certificate_options(parser: argparse.ArgumentParser, role: str) -> None:
    """Add ``--certificate`` and ``--no-authentication``, one of which must be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--certificate",
        metavar="FILE",
        help=f"the {role}'s file, made by certificates.py, that only its owner may read",
    )
    group.add_argument(
        "--no-authentication",
        action="store_true",
        help="serve, or send data to, whoever is at the other end, without encryption",
    )


def chosen_identity(
    options: argparse.Namespace, role: Literal["server", "client"]
) -> Identity | None:
    """Return the identity that the options name."""
    if options.no_authentication:
        return NO_AUTHENTICATION
    if options.certificate is None:
        raise CertificateError(
            f"There is no certificate: name a file with `--certificate`. {_MAKE_ONE} "
            "`--no-authentication` goes without: only where nobody else can reach the port."
        )
    return load_identity(options.certificate, role)
