"""The examples of docs/optimizer_and_gradients.md run as they stand there."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lq_testing.lightning_models import quiet

from lq_lightning import QuantizedPrecision

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "optimizer_and_gradients.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_python_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quiet()
    namespace: dict[str, Any] = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, source in enumerate(blocks("python")):
            exec(compile(source, f"block {number}", "exec"), namespace)
    shown = capsys.readouterr().out
    assert "net.1.weight (512, 128) 134144 quantized" in shown
    assert "net.0.weight (256, 128) 262144 embedding" in shown
    assert "net.1.bias 512 1-D" in shown


@pytest.mark.parametrize("source", blocks("yaml"))
def test_yaml_is_accepted(source: str, tmp_path: Path) -> None:
    quiet()
    (tmp_path / "page.yaml").write_text(source)
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    arguments = [f"--config={tmp_path / 'page.yaml'}", *options]
    cli = LightningCLI(LightningModule, run=False, args=arguments, save_config_callback=None)
    plugin = cli.trainer.precision_plugin
    assert isinstance(plugin, QuantizedPrecision)
    given = yaml.safe_load(source)["trainer"]["plugins"]["init_args"]
    assert plugin.precision == given["compute"]


def test_links_lead_somewhere() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text()):
            linked = page if not target else (page.parent / target)
            assert linked.exists(), f"{page.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
                anchors = {
                    re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
                }
                assert anchor[1:] in anchors, f"{page.name}: {target}{anchor}"
