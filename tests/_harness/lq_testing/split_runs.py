"""Small split runs in one process: a server in threads, and clients that train without a Trainer.

`examples/` must be on `sys.path`, as it is for the tests of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from split_learning.frozen import FrozenModel
from split_learning.model import SplitModel
from split_learning.session import Session
from split_learning.settings import SplitSettings
from split_learning.wire import Deadlines, Retry, Secret, Server, connect
from torch import Tensor

SECRET = Secret(b"0123456789abcdefghijklmnopqrstuv")
VOCAB = 264
QUICK = Deadlines(linger_s=0.2)


def batches(count: int = 4, batch: int = 2, tokens: int = 16) -> list[Tensor]:
    """Return random ids, the same at every call."""
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (batch, tokens), generator=drawn) for _ in range(count)]


@contextmanager
def serving(frozen: FrozenModel, port: int = 0) -> Iterator[Server]:
    """Serve a model on this machine."""
    with Server(
        ("127.0.0.1", port),
        SECRET,
        lambda connection: Session(frozen, connection).serve(),
        frozen.agreement(),
        deadlines=QUICK,
    ) as server:
        yield server


def load(settings: SplitSettings) -> FrozenModel:
    """Return the model of a server."""
    return FrozenModel(settings, torch.device("cpu"))


def client(settings: SplitSettings, server: Server, seed: int = 0, **gates: Any) -> SplitModel:
    """Return a client's model with adapters that are not zero anywhere."""
    torch.manual_seed(seed)
    retry = Retry(attempts=20, first_s=0.05, longest_s=0.1)
    model = SplitModel(
        settings,
        lambda agreement: connect(server.address, SECRET, agreement, deadlines=QUICK, retry=retry),
        **gates,
    )
    with torch.no_grad():
        for value in model.adapters.values().values():
            value.add_(0.02 * torch.randn(value.shape))
    return model


def train(
    model: SplitModel,
    steps: int = 12,
    lr: float = 1e-2,
    before_backward: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train and return the losses."""
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    losses = []
    for step in range(steps):
        ids = batches()[step % 4].to(trained[0].device)
        loss = model(input_ids=ids, labels=ids).loss
        before_backward(step)
        loss.backward()
        if model.gates is not None:
            model.gates.optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
