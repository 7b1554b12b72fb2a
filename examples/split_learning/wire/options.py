"""The options of a command that say how the two sides know each other."""

from __future__ import annotations

import argparse

from .authentication import NO_AUTHENTICATION, VARIABLE, Authentication, load_secret


def add_secret_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--secret-file`` and ``--no-authentication``, of which at most one may be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--secret-file",
        metavar="FILE",
        help="a file with the shared secret, at least 32 characters that only its owner may read; "
        f"without it the environment variable {VARIABLE} is taken",
    )
    group.add_argument(
        "--no-authentication",
        action="store_true",
        help="serve, or send data to, whoever is at the other end",
    )


def chosen_secret(arguments: argparse.Namespace) -> Authentication:
    """Return what the options say.

    Raises:
        SecretError: no secret, and no word that none is wanted.
    """
    if arguments.no_authentication:
        return NO_AUTHENTICATION
    return load_secret(arguments.secret_file)
