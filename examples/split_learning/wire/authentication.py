"""The shared secret, the keys of a session, and the tags that stand behind its messages.

Both sides choose a nonce. Each session has two keys, one per direction::

    session key = HMAC-SHA256(secret, "lq split learning" | SHA-256(hello frame | challenge frame))
    key of a direction = HMAC-SHA256(session key, "client to server" or "server to client")

(extract and expand as in HKDF, RFC 5869). The two frames hold the nonces and whether either side
wants authentication, so that nothing in them can be changed. Whoever tags the first message after
them knows the secret, and knew it in this session: that is the proof, in both directions.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from .errors import SecretError, TamperedFrame

VARIABLE = "LQ_SPLIT_LEARNING_SECRET"
SHORTEST_NBYTES = 32
TAG_NBYTES = 32
NONCE_NBYTES = 32
_FEWEST_DIFFERENT = 8
_MAKE_ONE = (
    'Make one with `python -c "import secrets; print(secrets.token_hex(32))"` and give it to both '
    "sides."
)


class Secret:
    """A secret that server and clients share; it shows itself in no log.

    Raises:
        SecretError: a secret that can be guessed: shorter than 32 bytes, or of few characters.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < SHORTEST_NBYTES or len(set(value)) < _FEWEST_DIFFERENT:
            raise SecretError(
                f"The shared secret has {len(value)} bytes, {len(set(value))} of them different; "
                f"it needs at least {SHORTEST_NBYTES} and {_FEWEST_DIFFERENT}. {_MAKE_ONE}"
            )
        self._value = value

    def __repr__(self) -> str:
        """Show nothing of it."""
        return "Secret(...)"

    def __reduce__(self) -> str:
        """Refuse to be written anywhere."""
        raise TypeError("A secret is not pickled: load it where it is needed.")

    def session_keys(self, transcript: bytes) -> tuple[bytes, bytes]:
        """Return the keys from client to server and back, of ``transcript``, both first frames."""
        extracted = b"lq split learning" + hashlib.sha256(transcript).digest()
        session = hmac.digest(self._value, extracted, "sha256")
        directions = (b"client to server", b"server to client")
        to_server, to_client = (hmac.digest(session, d, "sha256") for d in directions)
        return to_server, to_client


class NoAuthentication:
    """Stands where a secret would: whoever reaches the port is served, and nothing is checked."""

    def __repr__(self) -> str:
        """Show the name that it is imported by."""
        return "NO_AUTHENTICATION"


NO_AUTHENTICATION = NoAuthentication()
Authentication = Secret | NoAuthentication


def load_secret(path: str | Path | None = None) -> Secret:
    """Return the secret in a file, or in the environment variable LQ_SPLIT_LEARNING_SECRET.

    White space around it is dropped. There is no way to give it on the command line, where every
    user of the machine could read it.

    Args:
        path: the file. None takes the environment variable.

    Raises:
        SecretError: no secret, one that can be guessed, or a file that others may read.
    """
    if path is not None:
        return Secret(_read(Path(path).expanduser()).strip())
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        raise SecretError(
            f"There is no shared secret: name a file with `--secret-file`, or set {VARIABLE}. "
            f"{_MAKE_ONE} `--no-authentication` goes without: only where nobody else can reach "
            "the port."
        )
    return Secret(os.fsencode(value))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            value = file.read(4097)
    except OSError as error:
        raise SecretError(f"The file of the shared secret cannot be read: {error}.") from error
    if os.name == "posix" and stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(
            f"Other users may read or change the shared secret in {path} (mode "
            f"{stat.S_IMODE(mode):o}). Run `chmod 600 {path}`; if others have seen it, make a new "
            "one."
        )
    if len(value) > 4096:
        raise SecretError(f"{path} has more than 4096 bytes, so it is no file of a secret.")
    return value


def new_nonce() -> str:
    """Return a fresh nonce, as hexadecimal digits."""
    return secrets.token_hex(NONCE_NBYTES)


def is_nonce(value: object) -> bool:
    """Whether a peer's value can be a nonce."""
    digits = frozenset("0123456789abcdef")
    return isinstance(value, str) and len(value) == 2 * NONCE_NBYTES and set(value) <= digits


class Seal:
    """The tags of one direction: HMAC-SHA256 with its key, or none at all without a key."""

    def __init__(self, key: bytes | None = None) -> None:
        self._keyed = None if key is None else hmac.new(key, digestmod="sha256")
        self.nbytes = 0 if key is None else TAG_NBYTES

    def start(self) -> RunningTag:
        """Return a tag over nothing yet."""
        return RunningTag(None if self._keyed is None else self._keyed.copy())


class RunningTag:
    """A tag over bytes as they pass by."""

    def __init__(self, state: hmac.HMAC | None) -> None:
        self._state = state

    def update(self, passing: bytes | bytearray | memoryview) -> None:
        """Take in the next bytes."""
        if self._state is not None:
            self._state.update(passing)

    def digest(self) -> bytes:
        """Return the tag over all bytes up to here; empty without a key."""
        return b"" if self._state is None else self._state.digest()

    def check(self, received: bytes | bytearray) -> None:
        """Raise ``TamperedFrame`` unless this is the tag, in a time that tells nothing of it."""
        if not hmac.compare_digest(self.digest(), bytes(received)):
            raise TamperedFrame(
                "A message's tag is wrong: the message was changed on its way, or the two sides "
                "have different secrets. Compare the secrets; if they are the same, somebody "
                "interferes with the connection: use a tunnel (SSH, WireGuard, a VPN)."
            )
