"""The oldest versions of other packages, checked before names that only these have are imported."""

from __future__ import annotations

import math
import platform
import re
from importlib import import_module

MINIMUM_VERSIONS = {  # as in pyproject.toml, which is not installed
    "torch": "2.11",
    "lightning": "2.6.4",
    "torchmetrics": "1.0",
    "triton": "3.6",
}


def unmet_requirements() -> str | None:
    """Say which packages are missing or too old, and what to do; None if there is none.

    Only the numbers of a release count, so that pre-releases and builds of one's own pass:
    "2.12.0a0+git" is at least 2.12.
    """
    problems, names = [], []
    for name, minimum in MINIMUM_VERSIONS.items():
        found = _version(name)
        if found is None or _release(found) < _release(minimum):
            problems.append(f"{name} >= {minimum}, found {found or 'none'}")
            names.append(name)
    if not names:
        return None
    message = f"lq_lightning needs {' and '.join(problems)}: pip install -U {' '.join(names)}"
    if "triton" in names and platform.system() != "Linux":
        message += f". Triton is released for Linux only, and this is {platform.system()}"
    return message


def _version(name: str) -> str | None:
    # Of the module, not of the distribution, which has other names for nightly and AMD builds.
    try:
        return str(import_module(name).__version__)
    except ModuleNotFoundError as error:
        if error.name != name:  # it is there, and misses something itself
            raise
        return None


def _release(version: str) -> tuple[float, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else (math.inf,)  # unknown: let it try
