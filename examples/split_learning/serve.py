"""The server's command."""

from __future__ import annotations

import argparse
import logging
import signal
import warnings
from typing import Any

import torch

from .frozen import FrozenModel
from .session import Session
from .settings import OptionError, add_options, read_options, starting
from .wire import Server, add_secret_options, chosen_secret, parse_address

DEFAULT_ADDRESS = "127.0.0.1:5600"


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
    parser.add_argument("--max-clients", type=int, default=8, help="served at once (default: 8)")
    parser.add_argument(
        "--max-tokens", type=int, default=65_536, help="of a batch, at most (default: 65536)"
    )
    add_secret_options(parser)
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Serve until the process is told to stop."""
    options = read_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
    secret, settings = chosen_secret(options), read_options(options)
    address = parse_address(options.listen)
    with starting():
        model = FrozenModel(settings, torch.device(options.device), options.max_tokens)
    try:
        server = Server(
            address,
            secret,
            lambda connection: Session(model, connection).serve(),
            model.agreement(),
            max_clients=options.max_clients,
        )
    except OSError as error:
        raise OptionError(
            f"`--listen {options.listen}` cannot be had: {error}. End what listens there, or "
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
