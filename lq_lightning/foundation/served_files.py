"""A folder that other nodes read over HTTP, while its own node trains."""

from __future__ import annotations

import fcntl
import http.client
import secrets
import shutil
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

_CHUNK_NBYTES = 1 << 20
_NAME, _LOCK = "lq-node-", "lock"
# A proxy, for which the environment may have an address, would answer for nodes that are gone.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing of requests."""

    def list_directory(self, path: object) -> None:
        """Show that this folder is there, not what is in it."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


class ServedFolder:
    """A new folder of temporary files, which anyone who knows :attr:`url` can read.

    Its name is random, and is what protects it: as with torch's stores and process groups, nodes
    are expected to be in a network of their own.

    Args:
        host: Address of this machine under which others reach it.

    Attributes:
        path: The folder.
        url: Where the others find it.
    """

    def __init__(self, host: str) -> None:
        _remove_left_over()
        self._root = Path(tempfile.mkdtemp(prefix=_NAME))
        self._lock = (self._root / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # until this process ends, however it does
        self.path = self._root / secrets.token_hex(8)
        self.path.mkdir()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("_Server", (ThreadingHTTPServer,), {"address_family": family})
        self._server = server((host, 0), partial(_Handler, directory=str(self._root)))
        self._server.daemon_threads = True
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._server.server_port}/{self.path.name}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def files(self, folder: str) -> dict[str, int]:
        """Paths below a folder or of a file, from :attr:`path`, and their bytes."""
        start = self.path / folder
        found = [start] if start.is_file() else sorted(p for p in start.rglob("*") if p.is_file())
        return {str(p.relative_to(self.path)): p.stat().st_size for p in found}

    def remove(self, *names: str) -> None:
        """Remove files or folders."""
        for name in names:
            place = self.path / name
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)

    def close(self) -> None:
        """Serve nothing any more, and remove the folder."""
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self._root, ignore_errors=True)
        self._lock.close()


def _remove_left_over() -> None:
    """Remove the folders of processes that were killed."""
    for root in Path(tempfile.gettempdir()).glob(f"{_NAME}*"):
        try:
            with (root / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # it is in use, is being made, or belongs to somebody else
            continue
        shutil.rmtree(root, ignore_errors=True)


def is_served(url: str, timeout: float) -> bool | None:
    """Whether a folder is served under a URL; None if its machine does not answer in time."""
    try:
        with _DIRECT.open(f"{url}/", timeout=timeout):
            return True
    except urllib.error.HTTPError:  # another process has the port
        return False
    except ConnectionError:  # it has answered with the end of the connection
        return None
    except http.client.HTTPException:  # another process has the port, which speaks something else
        return False
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        return False if isinstance(reason, ConnectionRefusedError) else None


def fetch(url: str, name: str, target: Path, timeout: float) -> int:
    """Copy a served file to ``target``, which appears when it is complete; return its bytes.

    Raises:
        OSError: It is not there, or nothing has arrived for ``timeout`` seconds.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part, count = target.with_name(f"{target.name}.part"), 0
    try:
        with _DIRECT.open(f"{url}/{quote(name)}", timeout=timeout) as source:
            expected = int(source.headers.get("Content-Length", -1))
            with part.open("wb") as file:
                while chunk := source.read(_CHUNK_NBYTES):
                    file.write(chunk)
                    count += len(chunk)
        if count != expected:
            raise OSError(f"it ended after {count} of {expected} bytes")
    except (OSError, http.client.HTTPException) as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{url}/{name}: {error}") from error
    part.replace(target)
    return count


def own_address(host: str, port: int) -> str:
    """Address of this machine in the network through which it reaches another."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        found: str = probe.getsockname()[0]
    return found
