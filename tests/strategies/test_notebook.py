"""Several ranks in a notebook, where no script can be started once more for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# `sys.ps1` is what Lightning takes for a notebook; it looks when it is imported.
_NOTEBOOK = """
import sys
sys.ps1 = ">>> "
import json, warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from lq_lightning import WeightQuantization
from lq_lightning.strategies import QuantizedFSDPStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = None
    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch), batch)
    def training_step(self, batch, batch_idx):
        return self.loss(batch)
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

torch.manual_seed(0)
rows = torch.randn(64, 64)
data = torch.utils.data.DataLoader(rows, batch_size=8)
weights = WeightQuantization(bits=8)  # replicas, which fit validates with, are nearly exact
strategy = QuantizedFSDPStrategy(weights=weights, gradients="TLq-HS", node_size=1)
trainer = Trainer(
    strategy=strategy, accelerator="cpu", devices=2, max_epochs=3, logger=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
)
module = Module()
trainer.fit(module, data, data)
facts = {"fit": float(trainer.callback_metrics["val"]), "untrained": float(rows.square().mean())}
with torch.no_grad():
    facts["here"] = float(module.loss(rows))
facts["validate"] = trainer.validate(module, data, verbose=False)[0]["val"]
facts["types"] = sorted({type(value).__name__ for value in module.state_dict().values()})
facts["checkpoint"] = trainer.checkpoint_callback.best_model_path
print(json.dumps(facts))
"""


def test_notebook_gets_the_trained_weights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NOTEBOOK, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["here"] < 0.5 * facts["untrained"]
    assert abs(facts["here"] - facts["fit"]) < 1e-5  # whole weights, not the shards of one rank
    assert abs(facts["validate"] - facts["fit"]) < 1e-5
    assert facts["types"] == ["Tensor"]
    assert Path(facts["checkpoint"]).is_dir()
    assert not list(tmp_path.glob("lq-notebook-*"))
