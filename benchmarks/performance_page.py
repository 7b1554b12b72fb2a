"""Write the tables of the pages in docs from the reports in benchmarks/results.

    python benchmarks/performance_page.py            # rewrite what lies between the markers
    python benchmarks/performance_page.py --check    # exit 1 if that would change a page

A report that is missing leaves the command that makes it in place of its table.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import page_optimizer
import page_performance
from page_parts import Folder

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
Sections = Mapping[str, Callable[[Folder], str]]
PAGES: dict[str, Sections] = {
    "performance.md": page_performance.SECTIONS,
    "optimizer_and_gradients.md": page_optimizer.SECTIONS,
}


def fill(text: str, folder: Folder, sections: Sections) -> str:
    """Return the page with everything between its markers written anew.

    Raises:
        ValueError: A marker names no section, or a section has no marker.
    """
    named = [match[2] for match in MARKED.finditer(text)]
    if sorted(named) != sorted(sections):
        raise ValueError(
            f"the page marks {sorted(named)}, the sections are {sorted(sections)}: give each of "
            "them one pair of `<!-- begin: NAME -->` and `<!-- end: NAME -->`"
        )
    return MARKED.sub(lambda match: f"{match[1]}\n{sections[match[2]](folder)}\n{match[3]}", text)


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether all are up to date")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the pages")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    status = 0
    for name, sections in PAGES.items():
        page = args.docs / name
        old = page.read_text()
        new = fill(old, Folder(args.results, page), sections)
        if old == new:
            continue
        if args.check:
            changes = difflib.unified_diff(old.splitlines(), new.splitlines(), "page", "reports")
            print("\n".join(changes))
            print(f"{page} is out of date: run python benchmarks/performance_page.py")
            status = 1
        else:
            page.write_text(new)
            print(f"wrote {page}")
    return status


if __name__ == "__main__":
    sys.exit(main())
