"""Packages that split learning needs beyond those of this one."""

from __future__ import annotations

import importlib.util


def require(package: str) -> None:
    """Raise an error with a remedy when a package is missing.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"Split learning needs the package `{package}`: `pip install lq-lightning[hf]`, at "
            "both ends."
        )
