"""Make the certificates of a server and its clients, or revoke one.

python examples/split_learning/certificates.py certificates alice bob
python examples/split_learning/certificates.py certificates bob --revoke

The first call makes the authority (``authority.pem``, which signs and stays off both machines), the
server's file and an empty list of revoked certificates. Each ``NAME.pem`` holds a private key, its
certificate and that of the authority: all that one machine needs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import split_learning.wire  # noqa: F401 (tells which package is missing)

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from split_learning.wire.common import CertificateError
from split_learning.wire.identity import REVOKED_FILE, SERVER_NAME, fingerprint

_AUTHORITY, _SERVER = "authority", "server"
_AUTHORITY_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_Signer = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


def make_certificates(folder: Path, names: list[str], days: float = 365) -> None:
    """Make a certificate for each client, and those of the authority and the server if missing.

    ``names`` are those of clients, which servers log. The authority's certificate lasts ten years.
    """
    for name in names:
        _check_name(name)
        if (folder / f"{name}.pem").exists():
            raise CertificateError(
                f"{folder / name}.pem exists. Use another name, or `--revoke` it and remove the "
                "file before a new one is made."
            )
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / ".gitignore").write_text("*\n")  # private keys belong in no repository
    revoked = folder / REVOKED_FILE
    if not revoked.exists():
        revoked.write_text("# SHA-256 fingerprints of revoked certificates, one per line\n")
    if not (folder / f"{_AUTHORITY}.pem").exists():
        _write(folder / f"{_AUTHORITY}.pem", *_sign(_AUTHORITY, None, _AUTHORITY_DAYS))
    signer = _read_authority(folder)
    if not (folder / f"{_SERVER}.pem").exists():
        names = [_SERVER, *names]
    for name in names:
        _write(folder / f"{name}.pem", *_sign(name, signer, days), signer[1])


def revoke(folder: Path, names: list[str]) -> None:
    """Add the certificates of clients to the list, which servers read at every message."""
    for name in names:
        _check_name(name)
        try:
            revoked = fingerprint((folder / f"{name}.pem").read_bytes())
        except (OSError, ValueError) as error:
            raise CertificateError(
                f"There is no certificate {folder / name}.pem. If its fingerprint is in the "
                f"server's log, append that to {folder / REVOKED_FILE}."
            ) from error
        with (folder / REVOKED_FILE).open("a") as listed:
            listed.write(f"{revoked}  # {name}\n")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in (_AUTHORITY, _SERVER):
        raise CertificateError(
            f"{name!r} cannot be a client's name: use up to 40 letters, digits, - and _, and "
            f"neither {_AUTHORITY} nor {_SERVER}."
        )


def _sign(
    name: str, signer: _Signer | None, days: float
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new key and its certificate, signed by the authority, or by itself as one.

    A client's certificate is good for a client only, and has another name than the server's: it
    cannot pose as the server, nor sign others.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    authority, issuer = signer or (key, None)
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(issuer is None, 0 if issuer is None else None), True)
    )
    if issuer is not None:
        usage = ExtendedKeyUsageOID.CLIENT_AUTH
        host = f"{name}.client.invalid"
        if name == _SERVER:
            usage, host = ExtendedKeyUsageOID.SERVER_AUTH, SERVER_NAME
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), False)
    return key, builder.sign(authority, hashes.SHA256())


def _write(path: Path, key: ec.EllipticCurvePrivateKey, *certificates: x509.Certificate) -> None:
    """Write a file that only its owner may read, and that was not there."""
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = [one.public_bytes(serialization.Encoding.PEM) for one in certificates]
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(b"".join((private, *public)))


def _read_authority(folder: Path) -> _Signer:
    content = (folder / f"{_AUTHORITY}.pem").read_bytes()
    key = serialization.load_pem_private_key(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{folder / _AUTHORITY}.pem is not of this program.")
    return key, x509.load_pem_x509_certificate(content)


def main(arguments: list[str] | None = None) -> None:
    """Make certificates, or revoke them."""
    parser = argparse.ArgumentParser(
        prog="certificates.py", description="Make or revoke the certificates of split learning."
    )
    parser.add_argument("folder", type=Path, help="folder for the files; made if it is missing")
    parser.add_argument("clients", nargs="+", metavar="CLIENT", help="names of clients")
    parser.add_argument(
        "--days", type=float, default=365, help="days until certificates expire (default: 365)"
    )
    parser.add_argument("--revoke", action="store_true", help="revoke these clients' certificates")
    options = parser.parse_args(arguments)
    if options.revoke:
        revoke(options.folder, options.clients)
        print(f"revoked: give the server the new {options.folder / REVOKED_FILE}")
    else:
        make_certificates(options.folder, options.clients, options.days)
        made = ", ".join(f"{name}.pem" for name in options.clients)
        print(f"{options.folder} has server.pem and {made}")


if __name__ == "__main__":
    try:
        main()
    except CertificateError as error:  # which says what to do
        sys.exit(f"{type(error).__name__}: {error}")
