"""Write constraints from this environment: `python .ci/constraints.py > constraints.txt`.

Lists every installed distribution that the project and its extras need, directly or not; `.ci/task
docs` installs all of them.
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PROJECT = "lq-lightning"
# In no extra, see pyproject.toml.
ALSO = ["litdata"]
# torch's CUDA wheels pin their own Triton, so one exact version would shut them out.
RANGES = {"triton": "triton>=3.6,<=3.9.0"}
HEADER = """\
# Versions that the tests run with, from `python .ci/constraints.py` on Python {python}.
# Use: pip install -c constraints.txt -e .[dev]
"""


def needed() -> set[str]:
    """Return the canonical names of everything reachable from the project's requirements."""
    found: set[str] = set()
    extras = set(metadata.metadata(PROJECT).get_all("Provides-Extra") or [])
    todo = [(PROJECT, extra) for extra in ["", *sorted(extras)]] + [(name, "") for name in ALSO]
    seen: set[tuple[str, str]] = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            child = canonicalize_name(requirement.name)
            todo += [(child, e) for e in ["", *requirement.extras]]
    return found - {PROJECT}


def line(name: str) -> str:
    """Return the constraint for one installed distribution."""
    if name in RANGES:
        return RANGES[name]
    version = metadata.version(name).split("+")[0]
    python = SpecifierSet(metadata.metadata(name).get("Requires-Python", ""))
    marker = "" if python.contains("3.10.19") else ' ; python_version >= "3.11"'
    return f"{name}=={version}{marker}"


if __name__ == "__main__":
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    sys.stdout.write(HEADER.format(python=python))
    sys.stdout.writelines(f"{line(name)}\n" for name in sorted(needed()))
