"""FP8 matrix products: what hardware and torch demand of them, and the reference on a CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.nn.functional import pad as pad_tensor
from torch.nn.functional import scaled_mm as public_scaled_mm
from torch.torch_version import TorchVersion

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# cuBLASLt reads operands in 16 bytes: K and the number of rows of `b` are multiples of it.
OPERAND_MULTIPLE = 16
# Before it, traces of `torch.compile` end at the public function.
_PUBLIC_IS_TRACEABLE = TorchVersion(torch.__version__) >= "2.13"
# Ada. Hopper is 9.0.
_MIN_CAPABILITY = (8, 9)


def float8_matmul_available(device: torch.device) -> str | None:
    """Say why a device cannot multiply FP8 matrices; None if it can.

    To be asked before training starts. A CPU can: it computes the reference.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "ROCm" if device.type == "cuda" else device.type
        return (
            f"FP8 matrix products are implemented for NVIDIA GPUs, and in full precision on CPUs, "
            f"but not for {kind}. Choose native matrix products."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return (
            "FP8 matrix products need a GPU of compute capability "
            f"{'.'.join(map(str, _MIN_CAPABILITY))} (Ada, Hopper) or newer; this "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}. Choose "
            "native matrix products."
        )
    return None


def scaled_mm(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    *,
    fast_accumulation: bool,
) -> Tensor:
    """Multiply FP8 matrices: ``(a * scale_a) @ (b * scale_b).T``, ``[M, N]`` contiguous.

    On CUDA by cuBLASLt, on a CPU in fp32, which the former approaches up to the order and the
    precision of its sums. K, and N on CUDA, need not be multiples of 16: an operand for which one
    is not is copied with zeros appended. Make K one (``float8_cast`` does) to save that.

    Args:
        a_MK: ``[M, K]`` E4M3, contiguous.
        b_NK: ``[N, K]`` E4M3, contiguous.
        scale_a: fp32 of one element, the factor that decodes ``a_MK``.
        scale_b: The same for ``b_NK``.
        dtype: fp32, bf16 or fp16, of the result.
        fast_accumulation: Let Hopper add up in its tensor cores, with about 14 bits, instead of in
            fp32 every few steps. Customary forward, but not for gradients.

    Raises:
        ValueError: Other dtypes or shapes.
        RuntimeError: The GPU has no FP8 units; see ``float8_matmul_available``.
    """
    _check_operands(a_MK, b_NK, dtype)
    M, N = a_MK.shape[0], b_NK.shape[0]
    if not a_MK.is_cuda:
        return ((a_MK.float() @ b_NK.float().t()) * scale_a * scale_b).to(dtype)
    if not torch.compiler.is_compiling():  # compiled code was checked before
        _check_device(a_MK.device)
    if M == 0 or N == 0 or a_MK.shape[1] == 0:
        return torch.zeros(M, N, dtype=dtype, device=a_MK.device)
    a_MK = _padded(a_MK, 0, -a_MK.shape[1] % OPERAND_MULTIPLE)
    missing = -N % OPERAND_MULTIPLE
    b_NK = _padded(b_NK, missing, -b_NK.shape[1] % OPERAND_MULTIPLE)
    product = _product(a_MK, b_NK.t(), scale_a, scale_b, dtype, fast_accumulation)
    return pad_tensor(product, (0, -missing)) if missing else product


@cache
def _check_device(device: torch.device) -> None:
    """Raise what forbids FP8 on a device; asked once, which takes as long as a small product."""
    reason = float8_matmul_available(device)
    if reason is not None:
        raise RuntimeError(reason)


def _product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    if not _PUBLIC_IS_TRACEABLE:
        result: Tensor = torch._scaled_mm(
            a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast
        )
        return result
    per_tensor = ScalingType.TensorWise
    return public_scaled_mm(
        *(a, b, scale_a, per_tensor, scale_b, per_tensor), output_dtype=dtype, use_fast_accum=fast
    )


def _check_operands(a_MK: Tensor, b_NK: Tensor, dtype: torch.dtype) -> None:
    if {a_MK.dtype, b_NK.dtype} != {torch.float8_e4m3fn}:
        raise ValueError(
            f"scaled_mm: operands are {a_MK.dtype} and {b_NK.dtype}; both must be "
            "torch.float8_e4m3fn. Cast them with `float8_quantize`."
        )
    if a_MK.dim() != 2 or b_NK.dim() != 2 or a_MK.shape[1] != b_NK.shape[1]:
        raise ValueError(
            f"scaled_mm: operands are {list(a_MK.shape)} and {list(b_NK.shape)}; they must be "
            "[M, K] and [N, K]. Pass the transposed cast of an operand to sum over its rows."
        )
    if dtype not in OUTPUT_DTYPES:
        raise ValueError(
            f"scaled_mm: dtype={dtype} is not supported; allowed: "
            f"{', '.join(map(str, OUTPUT_DTYPES))}."
        )


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Append zeros; the matrix itself, contiguous, where there are none to append."""
    if not rows and not columns:
        return matrix.contiguous()
    # Byte by byte, since few operations know FP8; zero bytes are zeros.
    padded = pad_tensor(matrix.view(torch.uint8), (0, columns, 0, rows))
    return padded.view(matrix.dtype)
