"""Prepare training tokens from text that anyone has: the Linux kernel's sources, or Python's.

``--tokens`` of the loss studies reads the result. The kernel's source is an unpacked tree of
kernel.org or of a distribution; the same tree always gives the same tokens::

    apt-get download linux-source-6.12 && dpkg-deb -x linux-source-6.12_*.deb .
    tar xf usr/src/linux-source-6.12.tar.xz
    python benchmarks/research/kernel_text.py linux-source-6.12 kernel_tokens

Code, comments and documentation are kept; tables of registers and of numbers, most of which are
generated, are left out, and so are repeated files. Of the drivers, which are most of the tree, only
as much is taken as ``--megabytes`` leaves room for. The archive unpacks with ``tar xf``.

``--python`` reads all ``.py`` files below the given folders instead, such as those of the standard
library and of installed packages::

    python benchmarks/research/kernel_text.py --python --megabytes 62 --val-fraction 0.08 \\
        --sample-megabytes 25 /usr/lib/python3.11 .venv/lib/python3.11/site-packages python_tokens
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import re
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

SUFFIXES = (".S", ".c", ".h", ".py", ".rst", ".txt")
FOLDERS = (
    *("Documentation", "arch", "block", "certs", "crypto", "drivers", "fs", "include", "init"),
    *("io_uring", "ipc", "kernel", "lib", "mm", "net", "rust", "samples", "scripts", "security"),
    *("sound", "tools", "usr", "virt"),
)
# Written by tools from descriptions of the hardware, but too wordy for `is_table`.
GENERATED = ("drivers/gpu/drm/amd/include/", "drivers/accel/habanalabs/include/")
TABLE_NBYTES = 16384  # shorter files are never taken for tables
TABLE_DEFINES = 0.4  # share of non-empty lines
TABLE_DIGITS = 0.15  # share of bytes
VAL_FRACTION = 0.03
TEST_FRACTION = 0.001  # kept apart so that the other splits stay those of earlier reports
SPLITS = ("train", "val", "test")
END_OF_FILE, PADDING = "<|end_of_file|>", "<|padding|>"
_tokenizer: tokenizers.Tokenizer  # of a worker process
_DEFINE = re.compile(rb"^\s*#\s*define\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file: its path in the tree, with forward slashes, and its bytes."""

    path: str
    content: bytes


def read_files(tree: Path) -> list[TextFile]:
    """Read the text files to choose from, sorted by path; of equal files the first."""
    paths = {}
    for parent, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            relative = path.relative_to(tree).as_posix()
            wanted = path.suffix in SUFFIXES and relative.split("/")[0] in FOLDERS
            hidden = name.startswith(".") or relative.startswith(GENERATED)
            if wanted and not hidden and not path.is_symlink() and path.is_file():
                paths[relative] = path
    found = {}
    for relative, path in sorted(paths.items()):
        content = path.read_bytes()
        if content and is_text(content) and not is_table(content):
            found.setdefault(hashlib.sha256(content).digest(), TextFile(relative, content))
    return list(found.values())


def python_files(trees: Sequence[Path], max_nbytes: int) -> list[TextFile]:
    """Choose ``.py`` files below folders, in an order that depends on their contents alone.

    Args:
        trees: Where to look; of equal files, of whichever folder, one is kept.
        max_nbytes: Bytes to take.

    Raises:
        ValueError: the folders have no such file.
    """
    found = {}
    for tree in trees:
        for path in tree.rglob("*.py"):
            content = path.read_bytes()
            if content and path.is_file() and is_text(content) and not is_table(content):
                found[hashlib.sha256(content).hexdigest()] = content
    if not found:
        raise ValueError(f"there is no .py file below {[str(tree) for tree in trees]}")
    return take([TextFile(name, content) for name, content in found.items()], max_nbytes)


def is_text(content: bytes) -> bool:
    """Tell whether a file is UTF-8 without zeros."""
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


def split_files(
    files: Sequence[TextFile], val_fraction: float = VAL_FRACTION
) -> dict[str, list[TextFile]]:
    """Hold whole files out, in the order of a hash of their path."""
    ordered = sorted(files, key=lambda f: hashlib.sha256(f"0:{f.path}".encode()).digest())
    total = sum(len(file.content) for file in files)
    splits: dict[str, list[TextFile]] = {"val": [], "test": []}
    for split, fraction in (("val", val_fraction), ("test", TEST_FRACTION)):
        nbytes = 0
        while nbytes < fraction * total:
            nbytes += len(ordered[0].content)
            splits[split].append(ordered.pop(0))
    return splits | {"train": ordered}


def train_bpe(files: Sequence[TextFile], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE and write it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE, PADDING],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (file.content.decode("utf-8") for file in files), trainer=trainer, length=len(files)
    )
    tokenizer.save(str(path))


def is_table(content: bytes) -> bool:
    """Tell whether a file is mostly register definitions or numbers."""
    if len(content) <= TABLE_NBYTES:
        return False
    lines = sum(1 for line in content.split(b"\n") if line.strip())
    digits = sum(content.count(digit) for digit in b"0123456789")
    defines = len(_DEFINE.findall(content))
    return defines > TABLE_DEFINES * lines or digits > TABLE_DIGITS * len(content)


def by_hash(files: Sequence[TextFile]) -> list[TextFile]:
    """Return the files in an order that depends on nothing but their paths."""
    return sorted(files, key=lambda file: hashlib.sha256(file.path.encode()).digest())


def take(files: Sequence[TextFile], max_nbytes: int) -> list[TextFile]:
    """Take files in hash order until the next one would exceed ``max_nbytes``; sorted by path."""
    taken, nbytes = [], 0
    for file in by_hash(files):
        nbytes += len(file.content)
        if nbytes > max_nbytes:
            break
        taken.append(file)
    return sorted(taken, key=lambda file: file.path)


def select(tree: Path, max_nbytes: int) -> list[TextFile]:
    """Choose the files of a kernel source tree to train on.

    Args:
        tree: The unpacked tree.
        max_nbytes: Bytes to take; everything outside ``drivers`` comes first.

    Raises:
        ValueError: ``tree`` is no kernel source tree.
    """
    if not (tree / "kernel").is_dir() or not (tree / "Documentation").is_dir():
        raise ValueError(
            f"'{tree}' has no folders `kernel` and `Documentation`: give an unpacked Linux "
            "source tree"
        )
    files = read_files(tree)
    core = [file for file in files if not file.path.startswith("drivers/")]
    drivers = [file for file in files if file.path.startswith("drivers/")]
    room = max_nbytes - sum(len(file.content) for file in core)
    chosen = take(core, max_nbytes) if room < 0 else core + take(drivers, room)
    return sorted(chosen, key=lambda file: file.path)


def build(
    files: list[TextFile],
    vocab_size: int,
    sample_nbytes: int,
    out: Path,
    val_fraction: float = VAL_FRACTION,
) -> dict[str, Any]:
    """Train the tokenizer on a sample of the training files and write the tokens of all files.

    Args:
        files: The text.
        vocab_size: Size of the BPE vocabulary.
        sample_nbytes: Bytes of training text that the tokenizer learns from.
        out: Folder to write: ``{train,val,test}.npy`` (uint16), ``tokenizer.json`` and
            ``corpus.json`` (numbers).
        val_fraction: Share of the text to validate on.

    Returns:
        The numbers: a fingerprint of all tokens, and tokens, bytes and files per split.
    """
    splits = split_files(files, val_fraction)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    train_bpe(take(splits["train"], sample_nbytes), vocab_size, out / "tokenizer.json")
    fingerprint = hashlib.sha256()
    num_tokens = {}
    with multiprocessing.Pool(initializer=_open, initargs=(out / "tokenizer.json",)) as pool:
        for split in SPLITS:
            # Neighbours in the tree resemble each other: in this order tokens pack 3% smaller.
            ordered = sorted(splits[split], key=lambda file: file.path)
            parts = pool.map(_encode, [file.content for file in ordered], chunksize=64)
            tokens_N = np.concatenate(parts)
            np.save(out / f"{split}.npy", tokens_N)
            num_tokens[split] = len(tokens_N)
            fingerprint.update(f"{split}:{len(tokens_N)}:".encode() + tokens_N.tobytes())
    numbers = {
        "fingerprint": fingerprint.hexdigest()[:16],
        "num_tokens": num_tokens,
        "num_bytes": {split: sum(len(f.content) for f in splits[split]) for split in SPLITS},
        "num_files": {split: len(splits[split]) for split in SPLITS},
    }
    (out / "corpus.json").write_text(json.dumps(numbers, indent=1))
    return numbers


def _open(path: Path) -> None:
    global _tokenizer
    _tokenizer = tokenizers.Tokenizer.from_file(str(path))


def _encode(content: bytes) -> np.ndarray:
    """Return the tokens of a file and the one that ends it."""
    ids = _tokenizer.encode(content.decode("utf-8"), add_special_tokens=False).ids
    return np.array([*ids, _tokenizer.token_to_id(END_OF_FILE)], dtype=np.uint16)


def pack(folder: Path, archive: Path) -> None:
    """Write the folder's files as a ``.tar.xz`` without names or dates of this machine."""
    filters = [
        # Tokens have two bytes, whose positions matter; the dictionary spans the whole corpus.
        {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 512 * 2**20}
        | {"lc": 2, "lp": 1, "pb": 1}
    ]
    with (
        lzma.open(archive, "wb", filters=filters) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for path in sorted(folder.iterdir()):
            content = path.read_bytes()
            entry = tarfile.TarInfo(f"{folder.name}/{path.name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def main() -> None:
    """Select the text, write the tokens and pack them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, nargs="+", help="unpacked Linux source tree")
    parser.add_argument("out", type=Path, help="folder to write, replaced if it exists")
    parser.add_argument("--megabytes", type=int, default=410, help="1e6 bytes of text to take")
    parser.add_argument("--python", action="store_true", help="read .py files of these folders")
    parser.add_argument(
        "--val-fraction", type=float, default=VAL_FRACTION, help="of the text, to validate on"
    )
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--sample-megabytes", type=int, default=60, help="for the tokenizer")
    parser.add_argument("--archive", type=Path, help="also pack the folder as this .tar.xz")
    args = parser.parse_args()
    if len(args.tree) > 1 and not args.python:
        parser.error("the kernel has one source tree: give --python for several folders")
    nbytes = args.megabytes * 10**6
    files = python_files(args.tree, nbytes) if args.python else select(args.tree[0], nbytes)
    print(f"{len(files)} files, {sum(len(f.content) for f in files) / 1e6:.1f} MB", flush=True)
    numbers = build(
        files, args.vocab_size, args.sample_megabytes * 10**6, args.out, args.val_fraction
    )
    print(json.dumps(numbers))
    num_bytes, num_tokens = sum(numbers["num_bytes"].values()), sum(numbers["num_tokens"].values())
    print(f"{num_bytes / num_tokens:.3f} bytes per token")
    if args.archive:
        pack(args.out, args.archive)
        print(f"{args.archive}: {args.archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
