"""Checksums: equal for both kernels, and another one for any change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.checksum import checksums
from lq_lightning.kernels.checksum.op import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn]


def _values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    return values.mul(20).to(dtype)


@skip_old_interpreter
def test_the_kernel_matches_the_reference(device: torch.device) -> None:
    from lq_lightning.kernels.checksum.triton_kernels import launch_checksums

    sizes = [0, 1, 1023, 1024, 5000, 16384, 16385, 40000]
    tensors = [_values(n, dtype) for n in sizes for dtype in DTYPES]
    found = launch_checksums([t.to(device) for t in tensors])
    assert found.tolist() == checksums(tensors).tolist()
    assert len(set(found.tolist())) > 5 * (len(sizes) - 1) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[-1].mul_(-1),
        lambda x: x[1:4:2].neg_(),
        lambda x: x.neg_(),
        lambda x: x.mul_(0.5),
        lambda x: x.copy_(x.flip(0)),
        lambda x: x.copy_(x.roll(1)),
        lambda x: x.copy_(x.roll(1024)),
        lambda x: x[:2].copy_(x[:2].flip(0)),
        lambda x: x[7].add_(x[7].abs() * 0.01),
        lambda x: x.zero_(),
        lambda x: x.fill_(float("nan")),
    ],
)
def test_any_change_changes_it(change: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    values = _values(5000, dtype)
    before = checksums([values])
    assert torch.equal(checksums([values.clone()]), before)
    change(values)
    assert not torch.equal(checksums([values]), before)
    assert torch.equal(checksums([values]), checksums([values]))


class _OnGpu(Tensor):
    is_cuda = True


@skip_old_interpreter
@pytest.mark.parametrize("place", range(4))
def test_the_kernel_gets_no_tensor_of_the_cpu(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    from lq_lightning.kernels.checksum import triton_kernels

    launched: list[Tensor] = []

    def launch(tensors: list[Tensor]) -> Tensor:
        launched.extend(tensors)
        return torch.stack([checksum(t.as_subclass(Tensor)) for t in tensors])

    monkeypatch.setattr(triton_kernels, "launch_checksums", launch)
    tensors = [_values(n) for n in (0, 5, 1025, 7)]
    mixed = [t.as_subclass(_OnGpu) if n == place else t for n, t in enumerate(tensors)]
    assert checksums(mixed).tolist() == checksums(tensors).tolist()
    assert [t.is_cuda for t in launched] == [True] * 4
    assert sum(t.numel() for t in launched) == tensors[place].numel()


@skip_old_interpreter
def test_offloaded_tensors_lie_between_others(device: torch.device) -> None:
    tensors = [_values(n) for n in (0, 5, 1025, 7)]
    mixed = [t.to(device) if n % 2 else t for n, t in enumerate(tensors)]
    found = checksums(mixed)
    assert found.device.type == device.type
    assert found.tolist() == checksums(tensors).tolist()
