"""Modules built on the meta device: what has got no value by the first step is named."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from lq_lightning.foundation.meta_start import check_values, initialize_meta_tensors

CPU = torch.device("cpu")


class Rotary(nn.Module):
    """Computes its frequencies in ``__init__``, as most do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 5), persistent=False)


class Counting(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)


class Halfway(nn.Linear):
    """Forgets one of its parameters."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def _on_meta(make: object) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), make())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Rotary, "buffer `1.inv_freq`"),
        (lambda: nn.MultiheadAttention(4, 2), "parameter `1.in_proj_bias`"),
        (lambda: Halfway(4, 4), "parameter `1.bias`"),
        *(
            (lambda dtype=dtype: Counting(torch.ones(3, 2, dtype=dtype)), "buffer `1.buffer`")
            for dtype in (torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64)
        ),
        (lambda: Counting(torch.ones((), dtype=torch.int32)), "buffer `1.buffer`"),
        (
            lambda: Counting(torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)),
            "buffer `1.buffer`",
        ),
    ],
)
def test_what_lacks_a_value_is_named(make: object, name: str) -> None:
    module = _on_meta(make)
    initialize_meta_tensors(module, CPU)
    for _ in range(2):  # each step is refused
        with pytest.raises(RuntimeError, match=re.escape(name) + ".*made on the meta device"):
            check_values(module)
    for tensor in (*module[1].parameters(), *module[1].buffers()):
        with torch.no_grad():
            tensor.zero_()  # as a hook of the user's does, or a checkpoint
    check_values(module)


def test_one_number_that_is_left_out_is_seen() -> None:
    module = _on_meta(Rotary)
    initialize_meta_tensors(module, CPU)
    module[1].inv_freq[:3] = 1.0
    with pytest.raises(RuntimeError, match="nothing has given it all"):
        check_values(module)


def test_values_that_are_there_stay_and_shared_parameters_stay_shared() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False))
    module[2].weight = module[0].weight
    real = nn.Linear(4, 4)
    module.append(real)
    module.append(Counting(torch.full((2,), -1)))
    before = {name: tensor.clone() for name, tensor in real.state_dict().items()}
    initialize_meta_tensors(module, CPU)
    check_values(module)
    assert module[2].weight is module[0].weight
    assert module[0].weight.std() > 0.1
    assert module[1].num_batches_tracked == 0
    assert all(torch.equal(before[name], value) for name, value in real.state_dict().items())
    assert module[4].buffer.tolist() == [-1, -1]
