"""What the README and docs/ say is true: code runs, numbers are those of reports, links lead on.

Python blocks of a page run from top to bottom in one namespace, on one CPU rank. A block that
begins with ``# not run`` is only compiled, and what it calls of this package is looked up; so is
one below ``<!-- needs: PACKAGE -->`` where that package is missing.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lq_testing.lightning_models import quiet

import lq_lightning
from lq_lightning import GradientQuantization, WeightQuantization
from lq_lightning.data_parallel import embedding_params

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = {"README.md": 150, "performance.md": 150, "memory.md": 200}


class Block(NamedTuple):
    """A fenced block, and the package without which it cannot run."""

    source: str
    needs: str | None

    @property
    def missing(self) -> bool:
        return self.needs is not None and importlib.util.find_spec(self.needs) is None

    @property
    def runs(self) -> bool:
        return not self.missing and not self.source.startswith("# not run")


def blocks(page: Path, language: str) -> list[Block]:
    fence = rf"(?:<!-- needs: (\w+) -->\n)?^```{language}\n(.*?)^```$"
    found = re.findall(fence, page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(source, needs or None) for needs, source in found]


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=page.stem) for page in PAGES if blocks(page, language)]


# --- code -----------------------------------------------------------------------------------------


OURS = ("lq_lightning", "split_learning")


def _look_up_names(sources: list[str]) -> None:
    """Check that what blocks import of ours exists, and takes the arguments it is called with."""
    known: dict[str, Any] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(OURS):
                module = importlib.import_module(str(node.module))
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{node.module} has no {missing}"
                known |= {name.name: getattr(module, name.name) for name in node.names}
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in known:
                options = {key.arg: None for key in node.keywords if key.arg}
                inspect.signature(known[node.func.id]).bind_partial(*node.args, **options)


@pytest.mark.uninitialized_memory_ok  # transformers fills what it allocates later
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs_from_top_to_bottom(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = blocks(page, "python")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    # what is in integrations needs the package too
    unseen = ("lq_lightning.integrations",)
    _look_up_names(
        [b.source for b in found if not (b.missing and any(name in b.source for name in unseen))]
    )
    for package in ("transformers", "peft", "accelerate"):
        if any(f"from {package} import" in block.source for block in found):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    quiet()
    if "dist.init_process_group()" in page.read_text():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, block in enumerate(found):
            code = compile(block.source, f"{page.name}, block {number}", "exec")
            if block.runs:
                exec(code, namespace)
    if page.stem == "memory":
        shown = capsys.readouterr().out
        assert "net.1.weight (512, 128) 134144 quantized" in shown
        assert "net.0.weight (256, 128) 262144 embedding" in shown
    if page.stem == "layouts":
        rows = capsys.readouterr().out
        assert len(rows.splitlines()) == 25
        assert rows in page.read_text()


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_is_accepted(page: Path, tmp_path: Path) -> None:
    quiet()
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    for block in blocks(page, "yaml"):
        if not block.runs:
            continue
        (tmp_path / "page.yaml").write_text(block.source)
        arguments = [f"--config={tmp_path / 'page.yaml'}", *options]
        LightningCLI(LightningModule, run=False, args=arguments, save_config_callback=None)


@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_are_bash_and_make_what_exists(page: Path) -> None:
    commands = "\n".join(block.source for block in blocks(page, "bash"))
    done = subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True)
    assert not done.stderr
    made = set(re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {target for line in made for target in line.split()}
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= targets
    for module in re.findall(r"-m (lq_lightning[\w.]+)", commands):
        assert importlib.util.find_spec(module), module


SCRIPT = r"(?<![\w/])(?:benchmarks|examples)/[\w/]+"
# `benchmarks/NAME.py` in commit 0123456: tests/benchmarks/test_reports.py looks there.
LEFT = r"`benchmarks/\w+\.py` in commit [0-9a-f]{7}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_that_are_named_exist_and_have_the_options(page: Path) -> None:
    text = re.sub(LEFT, "", page.read_text())
    named = re.findall(rf"{SCRIPT}\.(?:py|sh|yaml)", text)
    assert not [path for path in named if not (ROOT / path).exists()]
    for path, options in _called_scripts(text):
        unknown = [each for each in options if not re.search(_declared(each), _beside(path))]
        assert not unknown, f"{path} has no {unknown}"


def _called_scripts(text: str) -> list[tuple[Path, list[str]]]:
    """Return the scripts that a page calls, in blocks or within a line, with their options."""
    lines = re.sub(r" *\\\n *", " ", text)
    calls = re.findall(rf"({SCRIPT}\.py)\b([^`\n]*)", lines)
    return [(ROOT / path, re.findall(r" (--[a-z][\w-]*)(?![\w.-])", rest)) for path, rest in calls]


def _declared(option: str) -> str:
    """Match an option of a parser, or the field that one is made of."""
    return rf'(?m)"{option}"|^    {option[2:].replace("-", "_")}: '


@cache
def _beside(path: Path) -> str:
    """Return the text of a script and of what lies in its folder, where its options may be."""
    return "".join(each.read_text() for each in [path, *path.parent.rglob("*.py")])


# --- numbers --------------------------------------------------------------------------------------


def _numbers(text: str) -> list[str]:
    """Numbers that stand alone: not those of names such as fp32, or of 1.4B."""
    words = re.split(r"[\s|(),;:`*]+", text)
    return [word.rstrip("x%") for word in words if re.fullmatch(r"[-+]?\d+(\.\d+)?[x%]?", word)]


@cache
def _table() -> ModuleType:
    """Import the table printer; nothing else finds the modules beside it."""
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(str(BENCHMARKS))
        table = importlib.import_module("table")
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)
    return table


def _printed(reports: list[str]) -> set[float]:
    """Return what the table printer says of some reports, each alone and all together."""
    table = _table()
    paths = [BENCHMARKS / "results" / report.split(":")[0] for report in reports]
    columns = reports[0].partition(":")[2]
    texts = [table.show([path]) for path in paths]
    texts.append(table.show(paths, [columns] if columns else []))
    return {float(number) for text in texts for number in _numbers(text)}


def _tables_of_reports() -> list[Any]:
    found = []
    for page in PAGES:
        pattern = r"<!-- numbers: (.*?) -->\n\n((?:\|.*\n)+)"
        for reports, table in re.findall(pattern, page.read_text()):
            found.append(pytest.param(reports.split(), table, id=f"{page.stem}-{reports[:30]}"))
    return found


@pytest.mark.parametrize(("reports", "table"), _tables_of_reports())
def test_numbers_are_those_of_the_reports(reports: list[str], table: str) -> None:
    printed = _printed(reports)
    wrong = []
    for line in table.splitlines()[2:]:
        for cell in line.split("|")[2:]:
            for number in _numbers(cell):
                # half of its last digit, and a little for what was printed rounded
                near = 0.505 * 10.0 ** -len(number.partition(".")[2])
                if not any(abs(value - float(number)) <= near for value in printed):
                    wrong.append(f"{number} in {line}")
    assert not wrong, "\n".join(wrong)


def test_what_more_bits_for_embeddings_and_heads_cost() -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        models = [transformers.GPT2LMHeadModel(transformers.GPT2Config())]
        models.append(transformers.LlamaForCausalLM(llama))
    gradients, differences = GradientQuantization(), WeightQuantization().codec()
    few, many = (gradients.codec("inter", vocabulary=words) for words in (False, True))
    shares = []
    for model in models:
        coded = sum(p.numel() for p in model.parameters() if p.ndim > 1)
        words = sum(p.numel() for p in embedding_params(model))
        more = many.nbytes(words) - few.nbytes(words)
        for before in (few.nbytes(coded), few.nbytes(coded) + differences.nbytes(coded)):
            shares.append(f"{more / before:.0%}")
    bits, page = many.code.removeprefix("int"), (ROOT / "docs" / "options.md").read_text()
    assert f'`"auto"`, the default, is {bits}, or' in page
    assert f"With {bits} instead of {few.code.removeprefix('int')} bits the codes" in page
    assert f"{shares[0]} more bytes for GPT-2 (124M parameters) and {shares[2]} more" in page
    assert f"together {shares[1]} and {shares[3]}." in page
    assert f'``"auto"`` is {bits}, or' in str(GradientQuantization.__doc__)


def test_the_check_of_numbers_sees_wrong_ones() -> None:
    assert _numbers("702 ms, (9.48x), -0.182%, `fp32`, 1.4B, int8, 45 reached") == (
        ["702", "9.48", "-0.182", "45"]
    )


# --- text -----------------------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor[1:] in _anchors(linked), f"{target}{anchor}"


def test_pages_stay_short() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert not {name: lines[name] for name, most in MAX_LINES.items() if lines[name] > most}


def _rows_of_options(name: str) -> dict[str, str]:
    """Return what the page of options says of a class: defaults by option."""
    page = (ROOT / "docs" / "options.md").read_text()
    _, *sections = re.split(rf"^##+ {name}\n", page, flags=re.MULTILINE)
    assert len(sections) == 1, name
    section = re.split(r"^#", sections[0], flags=re.MULTILINE)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(getattr(lq_lightning, name)).parameters)
    if name == "QuantizedPipelineStrategy":  # which takes those of the other strategy, too
        found.pop("options")
        shared = _parameters("QuantizedFSDPStrategy")
        differ = {key for key in shared if found.pop(key, shared[key]) != shared[key]}
        assert differ == {"reshard_after_forward"}
    return found


WITH_OPTIONS = [name for name in lq_lightning.__all__ if name[0].isupper()]
OPTIMIZERS = {"QuantizedAdam", "QuantizedAdamW", "QuantizedLion", "QuantizedSGD"} | {
    "QuantizedMuon"
}
WITHOUT_OPTIONS = {"ActivationPlan", "CommunicationPlan", "FullyShardedPrecision", "Topology"} | {
    "CodecSpec",
    "QuantizedActivations",
    "QuantizedCommunication",
}


@pytest.mark.parametrize("name", sorted(set(WITH_OPTIONS) - WITHOUT_OPTIONS - OPTIMIZERS))
def test_every_option_is_explained(name: str) -> None:
    rows, known = _rows_of_options(name), _parameters(name)
    assert list(rows) == list(known)
    for option, shown in rows.items():
        default = known[option].default
        if shown.startswith("`"):
            assert eval(shown.strip("`"), {}) == default, option
        else:  # in words: a default that depends on what there is, or is no literal
            assert (default is inspect.Parameter.empty) == (shown == "required"), option
            assert not isinstance(default, (bool, int, float, str)), option


def test_classes_of_the_page_of_options_are_at_the_top() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    named = re.findall(r"(?:^##+ |`)([A-Z][A-Za-z]*[a-z][A-Z]\w*)", page, re.MULTILINE)
    assert set(named) <= set(lq_lightning.__all__)
    assert {"CodecSpec", "OptimizerQuantization"} <= set(named)


def test_every_argument_of_optimizers_is_named() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    found = dict(re.findall(r"^\| `(Quantized\w+)` \| `(\w+=.*)` \|$", page, re.MULTILINE))
    assert set(found) == OPTIMIZERS
    for name, shown in found.items():
        parameters = _parameters(name)
        for shared in ("params", "quantization", "full_precision"):
            parameters.pop(shared)
        assert eval(f"dict({shown})", {}) == {k: v.default for k, v in parameters.items()}


def _messages() -> list[str]:
    """All texts in the library, those of f-strings with gaps."""
    texts = []
    for path in [*(ROOT / "lq_lightning").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_troubleshooting_names_messages_that_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Training")[2]
    shown = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    known = "\n".join(_messages()).replace("`", "")
    pieces = [piece.strip() for text in shown for piece in re.split(r"\.\.\.|\d+", text)]
    assert len(pieces) > 25
    assert not [piece for piece in pieces if piece and piece not in known]
