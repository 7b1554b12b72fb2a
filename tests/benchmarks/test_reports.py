"""Each report of benchmarks/results is read by a page, and says what it can be repeated with."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPORTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
SETTLED = "5b07bc7"  # where studies can be run that are no longer kept
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@cache
def commits(report: Path) -> list[str]:
    """Return what a report was measured at, a commit for each of its launches."""
    found = json.loads(report.read_text())
    made = found.get("environments") or [found["environment"]]
    return [environment["commit"].removesuffix("+changes") for environment in made]


def test_every_report_is_read() -> None:
    """A report that no page reads is evidence for nothing."""
    named = set(re.findall(r"(\w+\.json)", "".join(page.read_text() for page in PAGES)))
    assert not {report.name for report in REPORTS} - named


def test_commits_of_pages_are_those_of_reports() -> None:
    measured = {commit[:7] for report in REPORTS for commit in commits(report)} | {SETTLED}
    for page in PAGES:
        words = set(re.findall(r"\b[0-9a-f]{7}\b", page.read_text()))
        assert not {word for word in words if not word.isdigit()} - measured, page.name


def test_commits_of_reports_are_in_the_history() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no history")
    done = subprocess.run([git, "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    known = done.stdout.split()
    if (ROOT / ".git" / "shallow").exists() or done.returncode:
        pytest.skip("the history is cut off, or another user's")
    for report in REPORTS:
        for commit in commits(report):
            assert any(each.startswith(commit) for each in known), f"{report.name}: {commit}"


def test_every_report_names_command_versions_and_machine() -> None:
    for report in REPORTS:
        found = json.loads(report.read_text())
        for made in found.get("environments") or [found["environment"]]:
            assert re.match(r"(\S*/)?\w+\.py\b", made["command"]), report.name
            versions = made["versions"]
            assert versions["torch"], report.name
            assert made["gpus"] or versions["cuda"] is None, report.name
