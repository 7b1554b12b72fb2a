"""What the tests of checkpoints read."""

from __future__ import annotations

from pathlib import Path

import pytest
from lq_testing.checkpoints import save_both
from lq_testing.lightning_models import run_trainer


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fullTrue.ckpt` (a file), `fullFalse.ckpt` (a directory), and what they must hold."""
    folder: Path = tmp_path_factory.mktemp("saved")
    run_trainer(save_both, 2, str(folder))
    return folder
