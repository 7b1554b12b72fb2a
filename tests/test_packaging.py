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
from typing import Any

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def _folders_with_python(top: str) -> set[str]:
    folders = {p.parent.relative_to(ROOT) for p in (ROOT / top).rglob("*.py")}
    return {".".join(f.parts) for f in folders}


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
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
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


def test_every_folder_with_python_files_is_listed() -> None:
    folders = _folders_with_python("lq_lightning")
    folders |= {f"lq_lightning.{f}" for f in _folders_with_python("kernels")}
    assert set(SETUPTOOLS["packages"]) == folders


def test_every_kernel_folder_is_mapped() -> None:
    mapped = {f"lq_lightning.{f}": f.replace(".", "/") for f in _folders_with_python("kernels")}
    assert SETUPTOOLS["package-dir"] == {"lq_lightning": "lq_lightning"} | mapped


def test_wheel_holds_every_library_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {f for f in archive.namelist() if ".dist-info/" not in f}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "lq_lightning").rglob("*.py")}
    sources |= {f"lq_lightning/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").rglob("*.py")}
    assert files == sources | {"lq_lightning/py.typed"}


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
import importlib, importlib.util, pathlib, lq_lightning.kernels as k
print(pathlib.Path(importlib.util.find_spec("lq_lightning").origin).parent)
print(pathlib.Path(importlib.import_module("lq_lightning.kernels.quantize").__file__).parent)
spec = importlib.util.find_spec("kernels")
print("none" if spec is None else "namespace" if spec.origin is None else spec.origin)
"""


def _where(cwd: Path, path: str = "", python: str = sys.executable) -> list[str]:
    return _run(python, "-c", _WHERE, cwd=cwd, path=path).splitlines()


def test_wheel_imports_anywhere(unpacked_wheel: Path, tmp_path: Path) -> None:
    package, quantize, kernels = _where(tmp_path, str(unpacked_wheel))
    assert package == str(unpacked_wheel / "lq_lightning")
    assert quantize == str(unpacked_wheel / "lq_lightning" / "kernels" / "quantize")
    assert kernels == "none" or "kernels/__init__" in kernels


def test_uninstalled_checkout_imports_from_its_root(checkout: Path) -> None:
    package, quantize, kernels = _where(checkout)
    assert package == str(checkout / "lq_lightning")
    assert quantize == str(checkout / "kernels" / "quantize")
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
    package, quantize, kernels = _where(tmp_path, python=python)
    assert package == str(checkout / "lq_lightning")
    assert quantize == str(checkout / "kernels" / "quantize")
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
        "import lq_lightning.kernels.quantize, sys\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, vocab_size=8,\n"
        "    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))\n"
        "loaded = [m for m in sys.modules if m.startswith('kernels.')]\n"
        "file = getattr(sys.modules.get('kernels'), '__file__', None)\n"
        "print(is_kernels_available(), loaded, file)"
    )
    assert _run(sys.executable, "-c", code, cwd=checkout) == "False [] None"
