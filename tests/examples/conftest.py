"""Fixtures for the example's tests: its folder on the import path, and a small folder of text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def examples() -> Path:
    """The folder of the examples."""
    return EXAMPLES


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A folder with 30 text files of about 1 kB, and things that are no text."""
    folder = tmp_path / "text"
    for number in range(30):
        path = folder / f"part{number % 3}" / f"file{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        words = [f"word{(number * 7 + i * i) % 97}" for i in range(140)]
        path.write_text(f"# {number} grüße\n" + " ".join(words) + "\n", encoding="utf-8")
    (folder / "copy.txt").write_bytes((folder / "part0" / "file00.txt").read_bytes())
    (folder / "image.bin").write_bytes(b"\x89PNG\x00\x01")
    (folder / "latin.txt").write_bytes("grüße".encode("latin-1"))
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "secret.txt").write_text("hidden text")
    return folder
