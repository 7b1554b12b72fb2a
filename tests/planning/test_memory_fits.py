"""Memory of simulated fits, beside arithmetic of its own."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lq_lightning.activations import quantize_activations
from lq_lightning.callbacks import ActivationQuantization
from lq_lightning.data_parallel import WeightQuantization
from lq_lightning.planning.allocator import MIB
from lq_lightning.planning.machine import make_machine
from lq_lightning.planning.memory import of_host_memory, peak_memory
from lq_lightning.planning.simulation import simulate_fit
from lq_lightning.plugins import QuantizedPrecision
from lq_lightning.strategies import QuantizedFSDPStrategy

# Sources of allocations are those of the callers of torch, not of the tests' own wrappers.
pytestmark = pytest.mark.uninitialized_memory_ok

LAYERS, WIDTH, VOCABULARY, BATCH, TOKENS = 2, 1024, 8192, 4, 512
MACHINE = SimpleNamespace(gpu=SimpleNamespace(context_nbytes=0), nvlink=False)
MATRICES = LAYERS * 8 * WIDTH * WIDTH
ENDS = 2 * VOCABULARY * WIDTH
PARAMETERS = MATRICES + ENDS + (LAYERS + 1) * 2 * WIDTH


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Module(LightningModule):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = Net(self.layers)

    def training_step(self, tokens, index):
        return self.net(tokens)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.named_parameters(), lr=1e-3, fused=True)


def _sharded(**options):
    units = {"units": ["Block"], "check_replicas_every_n_steps": 0}
    return lambda: {"strategy": QuantizedFSDPStrategy(**units, **options)}


def _precise(states="none", sums="none", accumulate=1, precision="bf16-mixed"):
    return lambda: {
        "plugins": [QuantizedPrecision(precision, states, sums)],
        "accumulate_grad_batches": accumulate,
    }


FITS = {
    "plain": _precise(),
    "coded states": _precise("expanded_fp8"),
    "sums": _precise(accumulate=2),
    "coded sums": _precise(sums="int8", accumulate=2),
    "agoq": lambda: _precise()() | {"callbacks": [ActivationQuantization("agoq")]},
    "true": _precise(precision="bf16-true"),
    "agoq true": lambda: FITS["true"]() | {"callbacks": [ActivationQuantization("agoq")]},
    "deep": lambda: FITS["true"]() | {"callbacks": [ActivationQuantization("agoq")]},
    "deep offload": lambda: (
        FITS["true"]() | {"callbacks": [ActivationQuantization("agoq", offload=1.0)]}
    ),
    "fsdp": _sharded(weights="none", gradients="none"),
    "replica": lambda: _precise()() | _sharded(weights=WeightQuantization(replica="full"))(),
    "node": lambda: _precise()() | _sharded(weights=WeightQuantization(replica="node"))(),
}


PINNED = {}


@cache
def _fit(name, world_size=1, gpus_per_node=1):
    def build(overrides):
        own = FITS[name]()
        for key in ("plugins", "callbacks"):
            overrides[key] = [*own.pop(key, []), *overrides[key]]
        data = torch.randint(VOCABULARY, (BATCH * 8, TOKENS))
        module = Module(6 if name.startswith("deep") else LAYERS)
        return Trainer(**(own | overrides)), module, DataLoader(data, batch_size=BATCH)

    place = make_machine("A10G", world_size // gpus_per_node, gpus_per_node, network="10gbit")
    trace = simulate_fit(build, place)
    PINNED[name] = of_host_memory([trace], 8)
    return peak_memory(trace, MACHINE)


def _most(peak, kind):
    return peak.most.get(kind, 0)


def _near(nbytes, expected, error=0.01):
    assert nbytes == pytest.approx(expected, rel=error, abs=64 * 1024)


@pytest.mark.parametrize("name", ["plain", "coded sums", "agoq"])
def test_kinds_add_up(name):
    peak = _fit(name)
    outside = peak.kinds["CUDA and NCCL"] + peak.kinds["fragmentation"]
    assert sum(peak.kinds.values()) == peak.device_nbytes
    assert peak.device_nbytes - outside == peak.allocated_nbytes
    _near(peak.kinds["master weights"], 4 * PARAMETERS)
    assert "step" in peak.when


def test_bytes_per_parameter():
    plain, coded = _fit("plain"), _fit("coded states")
    _near(_most(plain, "optimizer states"), 8 * PARAMETERS)
    _near(_most(plain, "gradients"), 4 * PARAMETERS)
    assert _most(plain, "gradient sums") == 0
    # moments of embeddings stay in fp32, those of the head do not
    head = VOCABULARY * WIDTH
    _near(_most(coded, "optimizer states"), 2.05 * (MATRICES + head) + 8 * head, error=0.02)


def test_gradient_sums():
    _near(_most(_fit("sums"), "gradient sums"), 4 * PARAMETERS)
    assert 1.0 < _most(_fit("coded sums"), "gradient sums") / PARAMETERS < 1.2


def test_logits():
    """In fp32 and bf16: logits, their logarithms of probabilities, gradients of these."""
    logits = BATCH * TOKENS * VOCABULARY
    assert 3 * 4 * logits <= _most(_fit("plain"), "logits and loss") <= (3 * 4 + 2) * logits


@pytest.mark.parametrize("original", [True, False])
def test_saved_activations_are_those_that_are_measured(original):
    model, tokens = Net().bfloat16(), 64
    handle = quantize_activations(model, "agoq")
    with handle.measure(original=original) as saved:
        loss = model(torch.randint(VOCABULARY, (1, tokens)))
    logits = 2 * tokens * VOCABULARY
    del loss
    found = _most(_fit("true" if original else "agoq true"), "saved activations")
    # the allocator leaves up to 1 MiB of a block unused
    _near(found, (saved.nbytes - logits) * BATCH * TOKENS / tokens, 0.02 if original else 0.07)


def test_offloaded_activations_are_on_the_host():
    """Two blocks of six are left."""
    saved, left = (_most(_fit(name), "saved activations") for name in ("deep", "deep offload"))
    _near(left, saved * 2 / 6, 0.1)
    assert not PINNED["deep"]
    slab = "`offload` pins up to 0.5 GiB of host memory per rank, 4.0 GiB per node."
    assert PINNED["deep offload"] == (slab,)


@pytest.mark.parametrize(("world_size", "gpus_per_node"), [(2, 2), (1024, 8)])
def test_shards(world_size, gpus_per_node):
    peak = _fit("fsdp", world_size, gpus_per_node)
    # rows of a matrix are padded to a multiple of the ranks
    error = 0.01 if world_size == 2 else 0.1
    _near(_most(peak, "weights"), 4 * PARAMETERS / world_size, error)
    _near(_most(peak, "optimizer states"), 8 * PARAMETERS / world_size, error)
    assert _most(peak, "replica") == 0
    assert _most(peak, "gather buffers") > 4 * ENDS  # the ends stay gathered


@pytest.mark.parametrize(("name", "of_ranks"), [("replica", 1), ("node", 8)])
def test_replica(name, of_ranks):
    peak = _fit(name, 16, 8)
    _near(_most(peak, "replica"), 2 * PARAMETERS / of_ranks, 0.02)
    _near(_most(peak, "master weights"), 4 * PARAMETERS / 16)
    assert peak.kinds["CUDA and NCCL"] > 300 * MIB
