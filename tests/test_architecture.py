"""The import rules of the package, read from its syntax trees.

Imports go strictly down: planning, integrations -> strategies, plugins, callbacks -> checkpoint ->
data_parallel, optim, activations, pipeline, adaptive -> codecs -> foundation -> kernels, and
folders of one level never import each other.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {
    "planning": 6,
    "integrations": 6,
    "strategies": 5,
    "plugins": 5,
    "callbacks": 5,
    "checkpoint": 4,
    "data_parallel": 3,
    "optim": 3,
    "activations": 3,
    "pipeline": 3,
    "adaptive": 3,
    "codecs": 2,
    "foundation": 1,
    "kernels": 0,
}
SIDEWAYS = {("strategies", "plugins")}  # a strategy owns its precision plugin
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
WITH_PRIVATE_PARTS = {"torch", "lightning", "torchmetrics", "triton"}
# What FSDP2's private parameter groups and parameters call their parts, without an underscore.
FSDP2_PARTS = {
    "fsdp_params",
    "mesh_info",
    "offload_policy",
    "offload_to_cpu",
    "padded_sharded_param_size",
    "reduce_grads",
    "unsharded_accumulated_grad",
}
# Private attributes that are ours or, as Python's documentation says, public ones.
NOT_PRIVATE = {"_replace", "_fields", "_asdict", "_exit", "_getframe"}
OWN_PRIVATE = {
    ("strategies.sharding", "_no_split_modules"),  # of Hugging Face's models
    ("strategies.units", "_no_split_modules"),
}
MAX_FILE_LINES = 600
MAX_OWN_BASES = 1  # a class of ours may extend another one, which extends none of ours
DEEPER_CLASSES = {
    "lq_lightning.activations.sites:FunctionSite",
    "lq_lightning.activations.sites:MultiheadSite",
    "lq_lightning.integrations.ray:RayQuantizedFSDPStrategy",
    "lq_lightning.integrations.ray:RayQuantizedPipelineStrategy",
    "lq_lightning.strategies.changing_nodes:ChangingNodes",
}
# Files of up to 800 lines, and why each is one file.
LONG_FILES: dict[str, str] = {
    "lq_lightning.activations.sites": "each kind of site with its forward, and why it stands",
    "lq_lightning.kernels.message.reference": "the codec in torch, read beside its Triton twins",
    "lq_lightning.strategies.fully_sharded": "fifty hooks of Lightning, passed on to parts",
}


_parse = functools.cache(ast.parse)  # several checks read the same trees, and change none


def _sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "kernels":
        parts = ("lq_lightning", *parts)
    return ".".join(parts)


LIBRARY = {_module_name(p): p for p in _sources("lq_lightning", "kernels")}


def _folder(module: str) -> str:
    """Return the part after `lq_lightning.`: a folder's name, or that of a top-level module."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imports(tree: ast.AST, module: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every imported module, made absolute, with the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            yield base, [alias.name for alias in node.names]


def _downward_violations(source: str, module: str) -> list[str]:
    own = _folder(module)
    found = []
    for base, names in _imports(_parse(source), module):
        if base.split(".")[0] != "lq_lightning":
            continue
        # `from lq_lightning import codecs` names the folder after the import.
        whole = base != "lq_lightning" or not names
        targets = [base] if whole else [f"{base}.{name}" for name in names]
        for target in targets:
            folder = _folder(target)
            if own == folder == "_compat":
                continue
            if own == "_compat":
                found.append(f"{module} imports {target}: _compat is below everything")
            elif own in LEVELS and folder not in LEVELS and folder != "_compat":
                found.append(f"{module} imports {target}: the package root imports everything")
            elif (own, folder) in SIDEWAYS:
                continue
            elif folder not in (own, "_compat") and LEVELS.get(folder, -1) >= LEVELS.get(own, 9):
                found.append(f"{module} imports {target}: not below {own}")
    return found


def _lightning_violations(source: str, module: str) -> list[str]:
    if LEVELS.get(_folder(module), 9) >= LEVELS["checkpoint"] and _folder(module) != "_compat":
        return []
    tree = _parse(source)
    if _folder(module) == "_compat":
        tree = _without_lazy_imports(tree)
    return [
        f"{module} imports {base}"
        for base, _ in _imports(tree, module)
        if base.split(".")[0] in LIGHTNING
    ]


def _without_lazy_imports(tree: ast.Module) -> ast.Module:
    """Drop functions and `if TYPE_CHECKING:` blocks, which run no import with the module."""
    body = [
        node
        for node in tree.body
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return ast.Module(body=body, type_ignores=[])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_violations(source: str, module: str) -> list[str]:
    if _folder(module) == "_compat":
        return []
    tree = _parse(source)
    found = []
    for base, names in _imports(tree, module):
        if base.split(".")[0] in WITH_PRIVATE_PARTS:
            private = [part for part in [*base.split("."), *names] if _is_private(part)]
            found += [f"{module} imports {part} of {base}" for part in private]
    aliases = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] in WITH_PRIVATE_PARTS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in aliases:
                found.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
    return found


def _instance_violations(source: str, module: str) -> list[str]:
    """Private attributes of objects other than one's own, as far as a syntax tree shows them.

    Attributes of `self` may be inherited from torch or Lightning: overriding is what subclassing
    is for, and mypy checks that they exist.
    """
    if _folder(module) == "_compat":
        return []
    own = module.removeprefix("lq_lightning.")
    found = []
    for node in ast.walk(_parse(source)):
        name = _attribute(node)
        if name is None or name in NOT_PRIVATE or (own, name) in OWN_PRIVATE:
            continue
        if name in FSDP2_PARTS or (_is_private(name) and not _is_own(node)):
            found.append(f"{module}:{getattr(node, 'lineno', 0)} uses {ast.unparse(node)}")
    return found


def _attribute(node: ast.AST) -> str | None:
    """Name of the attribute that an expression reads or writes, also through `getattr`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id not in ("getattr", "hasattr", "setattr", "delattr") or len(node.args) < 2:
        return None
    name = node.args[1]
    return str(name.value) if isinstance(name, ast.Constant) else None


def _is_own(node: ast.AST) -> bool:
    target = node.value if isinstance(node, ast.Attribute) else None
    if isinstance(target, ast.Call) and isinstance(target.func, ast.Name):
        return target.func.id == "super"
    return isinstance(target, ast.Name) and target.id in ("self", "cls")


CHECKS = {
    "downward": _downward_violations,
    "lightning": _lightning_violations,
    "private": _private_violations,
    "instance": _instance_violations,
}


@pytest.mark.parametrize("check", CHECKS)
def test_library_keeps_the_import_rules(check: str) -> None:
    found = [v for name, path in LIBRARY.items() for v in CHECKS[check](path.read_text(), name)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        ("downward", "lq_lightning.codecs.x", "import lq_lightning.data_parallel.plan"),
        ("downward", "lq_lightning.codecs.x", "from lq_lightning import data_parallel"),
        ("downward", "lq_lightning.codecs.x", "from lq_lightning import CodecSpec"),
        ("downward", "lq_lightning.codecs.x", "import lq_lightning"),
        ("downward", "lq_lightning.codecs.x", "from ..strategies import S"),
        ("downward", "lq_lightning.strategies.x", "from lq_lightning.callbacks import C"),
        ("downward", "lq_lightning.kernels.quantize.op", "from lq_lightning.codecs import C"),
        ("downward", "lq_lightning._compat.torch", "from lq_lightning.codecs import C"),
        ("lightning", "lq_lightning.data_parallel.x", "def f():\n  import lightning.pytorch"),
        ("lightning", "lq_lightning._compat.lightning", "from lightning.pytorch import Trainer"),
        ("private", "lq_lightning.codecs.x", "from torch.distributed._tensor import DTensor"),
        ("private", "lq_lightning.codecs.x", "from torch import _C"),
        ("private", "lq_lightning.codecs.x", "import torch\ntorch._dynamo.reset()"),
        ("private", "lq_lightning.codecs.x", "import torch.distributed as dist\ndist._x()"),
        ("instance", "lq_lightning.strategies.x", "def f(module):\n  module._device_mesh = None"),
        ("instance", "lq_lightning.strategies.x", "self.get()._get_fsdp_state()"),
        ("instance", "lq_lightning.optim.x", "getattr(p, '_unsharded_param', None)"),
        ("instance", "lq_lightning.data_parallel.x", "[p for p in group.fsdp_params]"),
    ],
)
def test_checks_see_violations(check: str, module: str, source: str) -> None:
    assert CHECKS[check](source, module)


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        ("downward", "lq_lightning.strategies.x", "from lq_lightning.data_parallel import P"),
        ("downward", "lq_lightning.data_parallel.x", "from lq_lightning._compat.fsdp2 import A"),
        ("downward", "lq_lightning.kernels.requantize.op", "from lq_lightning.kernels import m"),
        (
            "lightning",
            "lq_lightning._compat.x",
            "def f():\n  from lightning.pytorch import Trainer",
        ),
        ("private", "lq_lightning.codecs.x", "from __future__ import annotations\nimport torch"),
        ("private", "lq_lightning._compat.x", "from torch.distributed._tensor import DTensor"),
        ("instance", "lq_lightning._compat.x", "group._all_reduce_hook"),
        ("instance", "lq_lightning.strategies.x", "super()._setup()\nself._x\nrun._replace(a=1)"),
    ],
)
def test_checks_let_the_rest_pass(check: str, module: str, source: str) -> None:
    assert not CHECKS[check](source, module)


def test_kernels_is_no_package_and_nothing_is_called_triton() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "kernels").glob("*.py"))
    folders = ("lq_lightning", "kernels", "examples", "benchmarks", "tests")
    named = [p for f in folders for p in (ROOT / f).rglob("triton*") if p.stem == "triton"]
    assert not named
    assert {p.parent.name for p in (ROOT / "tests").rglob("__init__.py")} == {"lq_testing"}


# Attributes of constants of kernels that are strings or formats.
NO_NUMBERS = {"activation", "code", "format", "kind", "norm", "scale_dtype"}


def _attribute_of_constant(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id.isupper()
    )


def test_kernels_name_attributes_before_they_pass_them_on() -> None:
    """Triton 3.6 takes strings and formats for tensors, and so numbers in tuples."""
    found = []
    for module, path in LIBRARY.items():
        if ".triton_" not in module:
            continue
        for call in ast.walk(_parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            for given in call.args:
                parts = [given]
                if isinstance(given, ast.Starred) and isinstance(given.value, ast.Tuple):
                    parts = given.value.elts
                for part in parts:
                    if _attribute_of_constant(part) and part.attr in NO_NUMBERS:
                        found.append(f"{module}: {name}({ast.unparse(part)})")
                    # functions of `tl` are built-in, but for this one
                    inner = part.elts if isinstance(part, ast.Tuple) else []
                    if name == "tl.zeros" or not name.startswith("tl."):
                        found += [
                            f"{module}: {name}({ast.unparse(part)})"
                            for element in inner
                            if _attribute_of_constant(element)
                        ]
    assert found == []


def test_library_prints_nothing_and_leaves_nothing_open() -> None:
    words = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]))
    found = []
    for name, path in LIBRARY.items():
        text = path.read_text()
        found += [f"{name}: {m.group()}" for m in words.finditer(text)]
        found += [
            f"{name}:{node.lineno} print("
            for node in ast.walk(_parse(text))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
    assert not found, "\n".join(found)


def test_files_stay_readable() -> None:
    long = {n: len(p.read_text().splitlines()) for n, p in LIBRARY.items()}
    limits = {n: 800 if n in LONG_FILES else MAX_FILE_LINES for n in long}
    assert not {n: lines for n, lines in long.items() if lines > limits[n]}
    assert not {n for n in LONG_FILES if long.get(n, 0) <= MAX_FILE_LINES}


def _own_bases(sources: dict[str, str]) -> dict[str, int]:
    """Count for each class, ``module:Name``, how many classes of ours lie in a line above it."""
    bases: dict[str, list[str]] = {}
    for module, source in sources.items():
        tree = _parse(source)
        names = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module) in sources
            for alias in node.names
        }
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names |= {node.name: f"{module}:{node.name}" for node in classes}
        for node in classes:
            found = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            known = [names[b.id] for b in found if isinstance(b, ast.Name) and b.id in names]
            bases[f"{module}:{node.name}"] = known

    def depth(name: str) -> int:
        return max((1 + depth(base) for base in bases.get(name, ())), default=0)

    return {name: depth(name) for name in bases}


def test_classes_extend_at_most_one_of_ours() -> None:
    depths = _own_bases({name: path.read_text() for name, path in LIBRARY.items()})
    assert {name for name, n in depths.items() if n > MAX_OWN_BASES} <= DEEPER_CLASSES
    tower = {
        "lq_lightning.a": "class A: pass\nclass B(A): pass",
        "lq_lightning.b": "from lq_lightning.a import B\nclass C(B): pass",
    }
    assert _own_bases(tower)["lq_lightning.b:C"] == 2


def test_modules_say_what_they_are_for() -> None:
    silent = [n for n, p in LIBRARY.items() if not ast.get_docstring(_parse(p.read_text()))]
    assert not silent


def test_module_names_follow_the_install_layout() -> None:
    assert (
        _module_name(ROOT / "kernels" / "quantize" / "op.py") == "lq_lightning.kernels.quantize.op"
    )
