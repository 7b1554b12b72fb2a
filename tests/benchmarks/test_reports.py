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
SETTLED = {"5b07bc7", "6574dfd", "ac819df"}  # in which studies can be run that are no longer kept
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


def history(*command: str) -> str:
    """Return what git prints; skip the test where there is no history."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists() or (ROOT / ".git" / "shallow").exists():
        pytest.skip("no history, or only its end")
    done = subprocess.run([git, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the history is another user's")
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commits_of_pages_are_those_of_reports(page: Path) -> None:
    """Other commits only beside the commit in which a study without a report can be run."""
    measured = {commit[:7] for report in REPORTS for commit in commits(report)} | SETTLED
    for line in page.read_text().splitlines():
        words = {w for w in re.findall(r"\b[0-9a-f]{7}\b", line) if not w.isdigit()}
        assert words & SETTLED or not words - measured, line


def test_commits_are_in_the_history() -> None:
    known = {commit[:7] for commit in history("rev-list", "HEAD").split()}
    named = {commit[:7] for report in REPORTS for commit in commits(report)}
    for page in PAGES:
        words = re.findall(r"\b[0-9a-f]{7}\b", page.read_text())
        named |= {word for word in words if not word.isdigit()}
    assert not named - known


def test_studies_that_left_are_in_the_commits_that_pages_name() -> None:
    pattern = r"`(benchmarks/\w+\.py)` in commit ([0-9a-f]{7})"
    found = {pair for page in PAGES for pair in re.findall(pattern, page.read_text())}
    assert found
    for path, commit in found:
        assert history("ls-tree", "--name-only", commit, path), f"{path} in {commit}"


def test_every_report_names_command_versions_and_machine() -> None:
    for report in REPORTS:
        found = json.loads(report.read_text())
        for made in found.get("environments") or [found["environment"]]:
            assert re.match(r"(\S*/)?\w+\.py\b", made["command"]), report.name
            versions = made["versions"]
            assert versions["torch"], report.name
            assert made["gpus"] or versions["cuda"] is None, report.name
