"""Small split runs in one process: a server in threads, and clients that train without a Trainer.

`examples/` must be on `sys.path`, as it is for the tests of examples.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from split_learning.certificates import make_certificates
from split_learning.frozen import FrozenModel
from split_learning.model import SplitModel
from split_learning.session import Session
from split_learning.settings import SplitSettings
from split_learning.wire.client import Connection, connect
from split_learning.wire.common import Deadlines, Retry
from split_learning.wire.identity import Identity, Revoked, load_identity
from split_learning.wire.messages import Message
from split_learning.wire.server import Server
from torch import Tensor

VOCAB = 264
# Long enough for a busy machine, except where a test waits for one of them to pass.
PATIENT = Deadlines(connect_s=20, idle_s=20, wait_s=20, stall_s=20)


@functools.cache
def certificates() -> Path:
    """Return a folder with the certificates of a server and of alice and bob, for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="certificates"))
    atexit.register(shutil.rmtree, folder)
    make_certificates(folder, ["alice", "bob"])
    return folder


def identity(name: str) -> Identity:
    """Return the server's identity, or that of alice or bob."""
    role: Any = "server" if name == "server" else "client"
    return load_identity(certificates() / f"{name}.pem", role)


def echo(message: Message) -> Iterable[Message]:
    """Answer with what came."""
    yield Message("output", message.fields, message.tensors)


@contextmanager
def answering(
    answer: Callable[[Message], Iterable[Message]] = echo, **changed: Any
) -> Iterator[Server]:
    """Give a server without a model, by default one that sends back what it gets."""
    options: dict[str, Any] = {
        "address": ("127.0.0.1", 0),
        "identity": identity("server"),
        "configuration": {"model": "tiny"},
        "revoked": Revoked(certificates() / "revoked.txt"),
        "deadlines": PATIENT,
    }
    with Server(open_session=lambda: answer, **(options | changed)) as server:
        yield server


def batches(count: int = 4, batch: int = 2, tokens: int = 16) -> list[Tensor]:
    """Return random ids, the same at every call."""
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (batch, tokens), generator=drawn) for _ in range(count)]


@contextmanager
def serving(frozen: FrozenModel, port: int = 0) -> Iterator[Server]:
    """Serve a model on this machine."""
    with Server(
        ("127.0.0.1", port),
        identity("server"),
        lambda: Session(frozen).answer,
        frozen.agreement(),
        revoked=Revoked(certificates() / "revoked.txt"),
    ) as server:
        yield server


def load(settings: SplitSettings) -> FrozenModel:
    """Return the model of a server."""
    return FrozenModel(settings, torch.device("cpu"))


def dial(server: Server, agreement: Any) -> Connection:
    """Connect as alice, to a server that may be about to start again."""
    retry = Retry(attempts=20, first_s=0.05, longest_s=0.1)
    return connect(server.address, identity("alice"), agreement, retry=retry)


def client(settings: SplitSettings, server: Server, seed: int = 0, **gates: Any) -> SplitModel:
    """Return a client's model with adapters that are not zero anywhere."""
    torch.manual_seed(seed)
    model = SplitModel(settings, lambda agreement: dial(server, agreement), **gates)
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
