"""What is installed: wheel, sdist and editable contents, and who answers to `import kernels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import lq_lightning

ROOT = Path(__file__).resolve().parents[1]


def _run(*command: str, cwd: Path, path: str = "") -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    if path:
        env["PYTHONPATH"] = path
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is needed to build, so that the working tree stays clean."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("lq_lightning", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    # Where the parts come from does not depend on what they import, which takes seconds.
    (copy / "lq_lightning" / "__init__.py").write_text("")
    return copy


def _build(checkout: Path, hook: str, *args: object) -> Path:
    """Call a hook of the build backend in this environment: no isolation, hence no network."""
    out = checkout / "dist"
    out.mkdir(exist_ok=True)
    call = f"import setuptools.build_meta as b; print(b.{hook}({str(out)!r}))"
    return out / _run(sys.executable, "-c", call, cwd=checkout).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return _build(checkout, "build_wheel")


@pytest.fixture(scope="module")
def unpacked_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_wheel_holds_every_library_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {f for f in archive.namelist() if ".dist-info/" not in f}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "lq_lightning").rglob("*.py")}
    sources |= {f"lq_lightning/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").rglob("*.py")}
    assert files == sources | {"lq_lightning/py.typed"}
    assert wheel.name.split("-")[1] == lq_lightning.__version__


def test_new_folders_are_packaged(checkout: Path, tmp_path: Path) -> None:
    """A package that is added needs no list to be changed."""
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("dist", "build", "*.egg-info"))
    for name in ("lq_lightning/later/deep", "lq_lightning/later", "kernels/later"):
        (copy / name).mkdir(parents=True, exist_ok=True)
        (copy / name / "__init__.py").touch()
    with zipfile.ZipFile(_build(copy, "build_wheel")) as archive:
        names = set(archive.namelist())
    later = {
        f"lq_lightning/{name}/__init__.py" for name in ("later", "later/deep", "kernels/later")
    }
    assert later <= names


def test_sdist_rebuilds_the_same_wheel(
    checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sdist = _build(checkout, "build_sdist")
    target = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (source,) = target.iterdir()
    assert (source / "LICENSE").is_file()
    rebuilt = _build(source, "build_wheel")
    with zipfile.ZipFile(rebuilt) as a, zipfile.ZipFile(wheel) as b:
        assert set(a.namelist()) == set(b.namelist())


# Where the parts of the package come from. `ours` says whether `import kernels` is our folder: a
# namespace package over a bare folder (no code runs) loses to any real `kernels` distribution.
_WHERE = """
import importlib.util, pathlib
for name in ("lq_lightning", "lq_lightning.kernels.message"):
    print(pathlib.Path(importlib.util.find_spec(name).origin).parent)
spec = importlib.util.find_spec("kernels")
print("none" if spec is None else "namespace" if spec.origin is None else spec.origin)
"""


def _where(cwd: Path, path: str = "", python: str = sys.executable) -> list[str]:
    return _run(python, "-c", _WHERE, cwd=cwd, path=path).splitlines()


def test_wheel_imports_anywhere(unpacked_wheel: Path, tmp_path: Path) -> None:
    package, message, kernels = _where(tmp_path, str(unpacked_wheel))
    assert package == str(unpacked_wheel / "lq_lightning")
    assert message == str(unpacked_wheel / "lq_lightning" / "kernels" / "message")
    assert kernels == "none" or "kernels/__init__" in kernels


def test_uninstalled_checkout_imports_from_its_root(checkout: Path) -> None:
    package, message, kernels = _where(checkout)
    assert package == str(checkout / "lq_lightning")
    assert message == str(checkout / "kernels" / "message")
    assert not kernels.startswith(str(checkout))


@pytest.mark.parametrize("mode", ["default", "compat"])
def test_editable_install_imports_anywhere(checkout: Path, tmp_path: Path, mode: str) -> None:
    pytest.importorskip("pip")
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, system_site_packages=False)
    python = str(environment / "bin" / "python")
    # The packages of this environment come after those of the new one, which so has its own finder.
    here = [p for p in sys.path if p.endswith("site-packages")]
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text("\n".join(here))
    mode_options = [] if mode == "default" else ["-C", f"editable_mode={mode}"]
    _run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--no-build-isolation", "--no-index", *mode_options, "-e", str(checkout)),
        cwd=tmp_path,
    )
    package, message, kernels = _where(tmp_path, python=python)
    assert package == str(checkout / "lq_lightning")
    assert message == str(checkout / "kernels" / "message")
    assert not kernels.startswith(str(checkout))


def test_other_kernels_distribution_wins_in_a_checkout(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("OWNER = 'someone else'\n")
    code = "import kernels; print(kernels.OWNER)"
    path = os.pathsep.join([str(checkout), str(tmp_path)])  # ours first, and it still loses
    assert _run(sys.executable, "-c", code, cwd=checkout, path=path) == "someone else"


def test_transformers_is_unaffected_in_a_checkout(checkout: Path) -> None:
    pytest.importorskip("transformers")
    # With no distribution called kernels, transformers may look at our folder; it finds no code.
    code = (
        "import lq_lightning.kernels.message, sys\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, vocab_size=8,\n"
        "    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))\n"
        "loaded = [m for m in sys.modules if m.startswith('kernels.')]\n"
        "file = getattr(sys.modules.get('kernels'), '__file__', None)\n"
        "print(is_kernels_available(), loaded, file)"
    )
    assert _run(sys.executable, "-c", code, cwd=checkout) == "False [] None"


_OFFLINE_PIP = """#!/bin/sh
echo 'WARNING: Retrying (...) after connection broken by NewConnectionError' >&2
echo 'ERROR: ResolutionImpossible: conflicting dependencies' >&2
exit 1
"""


@pytest.mark.parametrize(("reason", "shown"), [("NewConnectionError", 1), ("other", 2)])
def test_installing_without_a_network_says_so(reason: str, shown: int, tmp_path: Path) -> None:
    """Anything else that goes wrong is shown as pip says it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(_OFFLINE_PIP.replace("NewConnectionError", reason))
    python.chmod(0o755)
    (tmp_path / ".stamp-venv").touch()
    done = subprocess.run(
        [ROOT / ".ci" / "task", "install-examples"],
        env={**os.environ, "VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert len(lines) == shown, lines
    assert ("pip cannot reach the package index" in lines[0]) == (shown == 1)
