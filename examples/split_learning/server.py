"""Hold the frozen trunk of a causal language model for clients that fine-tune it.

python examples/split_learning/server.py --certificate certificates/server.pem --model FOLDER
python examples/split_learning/server.py --help
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from split_learning.frozen import FrozenModel
from split_learning.session import Session
from split_learning.settings import (
    DEFAULT_ADDRESS,
    OptionError,
    add_options,
    read_options,
    starting,
)
from split_learning.wire.common import AddressError, CertificateError, parse_address
from split_learning.wire.identity import (
    REVOKED_FILE,
    Revoked,
    add_certificate_options,
    chosen_identity,
)
from split_learning.wire.server import Server


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="server.py",
        description="Hold the frozen trunk of a causal language model for clients that fine-tune.",
    )
    parser.add_argument(
        "--listen", default=DEFAULT_ADDRESS, help=f"host:port (default: {DEFAULT_ADDRESS})"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--max-clients", type=int, default=8, help="clients served at once (default: 8)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=65_536, help="most tokens of a batch (default: 65536)"
    )
    add_certificate_options(parser, "server")
    parser.add_argument(
        "--revoked",
        metavar="FILE",
        help=f"list of revoked certificates (default: {REVOKED_FILE} beside the certificate)",
    )
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Serve until the process is told to stop."""
    options = read_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    identity, settings = chosen_identity(options, "server"), read_options(options)
    revoked = None
    if identity is not None:
        revoked = Revoked(options.revoked or Path(options.certificate).with_name(REVOKED_FILE))
    address = parse_address(options.listen)
    with starting():
        model = FrozenModel(settings, torch.device(options.device), options.max_tokens)
    try:
        server = Server(
            address,
            identity,
            lambda: Session(model).answer,
            model.agreement(),
            revoked=revoked,
            max_clients=options.max_clients,
        )
    except OSError as error:
        raise OptionError(
            f"`--listen {options.listen}` is not available: {error}. Stop what listens there, or "
            "choose another port, or an address of this machine."
        ) from error

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    host, port = server.address
    print(f"{settings.model} is served on {host}:{port}; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.stop()


if __name__ == "__main__":
    try:
        main()
    except (AddressError, CertificateError, OptionError) as error:  # which say what to do
        sys.exit(f"{type(error).__name__}: {error}")
