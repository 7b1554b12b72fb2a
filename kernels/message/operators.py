"""Operators of ``lq_lightning``: registration, reuse of launches and checks; operators on messages.

On the host, checks, the choice of tiles and Triton's way to a compiled kernel take many times as
long as the launch itself: of 112 us of a call of ``norm_quantize``, 10 were its launch. All of it
depends only on shapes, strides, dtypes, devices, alignments and constants, which are the key of a
call: its launch is cached and serves every call with the same key.

Operators whose name ends with ``_out`` write to a tensor they are given. ``relaunch_*`` repeat a
call of such an operator without the dispatcher, and return False if no such call is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .format import ALIGNMENT_NBYTES, parse_format
from .reference import seed_words

# Of all operators together. A model has a few dozen per number of tokens.
MAX_CALLS = 4096


class Call(NamedTuple):
    """Results and launch that calls with one key share.

    Attributes:
        results: shape and dtype of each result.
        launch: function that computes them, given the tensors of the call and then its results.
        zeroed: index of the result that must be zero before the launch, if there is one.
    """

    results: tuple[tuple[torch.Size, torch.dtype], ...]
    launch: Callable[..., None]
    zeroed: int | None

    def repeat(self, first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        """Return the results for other tensors, which have the same ``tensor_key``."""
        results = [first.new_empty(shape, dtype=dtype) for shape, dtype in self.results]
        if self.zeroed is not None:
            results[self.zeroed].zero_()
        self.launch(first, *others, *results)
        return tuple(results)


_CALLS: dict[Hashable, Call] = {}


def tensor_key(tensor: Tensor | None) -> Hashable:
    """Return the part of a call's key for a tensor: everything but its address and contents."""
    if tensor is None:
        return None
    misalignment = tensor.data_ptr() % ALIGNMENT_NBYTES
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), misalignment


def find_call(key: Hashable) -> Call | None:
    """Return the cached call of a key, or None."""
    return _CALLS.get(key)


def cache_call(
    key: Hashable,
    results: Sequence[Tensor],
    launch: Callable[..., None],
    zeroed: int | None = None,
) -> None:
    """Cache the launch of a call that succeeded.

    Args:
        key: name of the operator, ``tensor_key`` of its tensors, and all its other arguments.
        results: results of the call, each contiguous and in memory of its own.
        launch: as in ``Call``.
        zeroed: as in ``Call``.
    """
    if len(_CALLS) >= MAX_CALLS:  # lengths of sequences that rarely come again
        _CALLS.clear()
    made = tuple((result.shape, result.dtype) for result in results)
    _CALLS[key] = Call(made, launch, zeroed)


def clear_cached_calls() -> None:
    """Forget all launches: the next call of each operator checks and chooses again."""
    _CALLS.clear()


_LIBRARY = torch.library.Library("lq_lightning", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_operator(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> Any:
    """Define ``lq_lightning::<name>`` for CPU and CUDA tensors and return it.

    Registered with the dispatcher alone: the Python layers of ``torch.library.custom_op`` take
    longer than the launch of a kernel. They would derive autograd formulas, of which there are none
    here, and count writes to mutated arguments, which ``kernel`` does (see ``count_write``).

    Args:
        schema: name, arguments and result in the language of ``torch.library.Library.define``.
        kernel: the implementation; raises ``ValueError`` for arguments that it cannot take.
        fake: returns empty results of the right shape, dtype and device, for traces; None for
            operators without results.

    Returns:
        The operator, to be called with the arguments in order.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.pt2_compliant_tag,)
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    fake = fake or (lambda *arguments: None)
    torch.library.register_fake(f"lq_lightning::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lq_lightning, name).default


class Launched(NamedTuple):
    """Results of a launch, and how to launch it again; see ``Call``."""

    results: tuple[Tensor, ...]
    launch: Callable[..., None]
    zeroed: int | None = None


def cached_operator(
    schema: str, fake: Callable[..., Any]
) -> Callable[[Callable[..., Tensor | tuple[Tensor, ...] | Launched]], Any]:
    """Define an operator whose checks and launch are cached for calls with the same key.

    Decorates a function that takes the arguments of ``schema``, checks them, and computes on a CPU
    or returns a ``Launched``; its name becomes the operator.

    Args:
        schema: as for ``define_operator``; a launch is repeated with the arguments whose type
            begins with ``Tensor``.
        fake: as for ``define_operator``.
    """
    name, _, rest = schema.partition("(")
    arguments, _, result = rest.partition(") ->")
    is_tensor = [part.strip().startswith("Tensor") for part in arguments.split(",")]
    single = "(" not in result

    def decorate(kernel: Callable[..., Tensor | tuple[Tensor, ...] | Launched]) -> Any:
        def run(*given: Any) -> Tensor | tuple[Tensor, ...]:
            pairs = list(zip(given, is_tensor, strict=True))
            key = (name, *[tensor_key(value) if tensor else value for value, tensor in pairs])
            call = find_call(key)
            if call is not None:
                results = call.repeat(*[value for value, tensor in pairs if tensor])
                return results[0] if single else results
            made = kernel(*given)
            if not isinstance(made, Launched):
                return made
            cache_call(key, made.results, made.launch, made.zeroed)
            return made.results[0] if single else made.results

        return define_operator(schema, run, fake)

    return decorate


def count_write(*outs: Tensor) -> None:
    """Tell autograd that a kernel has written to ``outs``, as torch's own operators do."""
    try:
        torch.autograd.graph.increment_version(outs)
    except RuntimeError:  # inference tensors count nothing; others may count twice
        torch.autograd.graph.increment_version([out for out in outs if not out.is_inference()])


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless values of ``dtype`` can be encoded, or decoded to."""
    if dtype not in _FLOATS:
        raise ValueError(
            f"{name} has dtype {dtype}; allowed: float32, bfloat16, float16. Convert it, e.g. "
            f"{name}.float()."
        )


def check_rows(name: str, rows: Tensor) -> None:
    """Raise ``ValueError`` unless the last dimension of ``rows`` is contiguous."""
    if rows.shape[-1] > 1 and rows.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {rows.stride(-1)} in its last dimension; rows must be contiguous "
            f"(stride 1). Pass {name}.contiguous()."
        )


def check_message(name: str, message: Tensor, nbytes: int) -> None:
    """Raise ``ValueError`` unless rows have ``nbytes``, are contiguous and 16-byte aligned."""
    if message.shape[-1] != nbytes:
        raise ValueError(
            f"{name} has rows of {message.shape[-1]} bytes, but this format and numel need "
            f"{nbytes}. Decode with the spec and numel that the rows were encoded with."
        )
    check_rows(name, message)
    steps = [
        stride
        for size, stride in zip(message.shape[:-1], message.stride()[:-1], strict=True)
        if size > 1
    ]
    if message.numel() and any(at % ALIGNMENT_NBYTES for at in (message.data_ptr(), *steps)):
        raise ValueError(
            f"{name} starts at address {message.data_ptr():#x} with row strides {steps}; every row "
            f"must start at a multiple of {ALIGNMENT_NBYTES} bytes. Slice buffers at multiples of "
            "spec.nbytes(numel)."
        )


# --- operators on messages ---


def _relaunch(
    key: Hashable, out: Tensor, *tensors: Tensor | None, **words: tuple[int, int]
) -> bool:
    call = find_call(key)
    if call is None:
        return False
    call.launch(*tensors, out, **words)
    count_write(out)
    return True


def _compute(name: str, key: Hashable, out: Tensor, *arguments: Any) -> None:
    """Write ``out`` with the function ``name`` of the device, and cache the launch of a kernel."""
    if out.is_cuda:
        from . import triton_kernels

        cache_call(key, (), getattr(triton_kernels, f"launch_{name}")(*arguments))
    else:
        getattr(reference, name)(*arguments)
    count_write(out)


def _quantize_key(
    x: Tensor, reference: Tensor | None, format: str, out: Tensor, skip: int | None
) -> Hashable:
    return "quantize", tensor_key(x), tensor_key(reference), format, tensor_key(out), skip


def relaunch_quantize(
    x: Tensor, reference: Tensor | None, format: str, seed: int, out: Tensor, skip: int | None
) -> bool:
    """Repeat ``quantize_out``."""
    key = _quantize_key(x, reference, format, out, skip)
    return _relaunch(key, out, x, reference, words=seed_words(seed))


def _quantize_out(
    x: Tensor,
    reference: Tensor | None,
    format: str,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Encode ``x`` (minus ``reference``) into ``out``.

    Args:
        x: ``[R, N]`` or ``[P, Q, N]`` fp32, bf16 or fp16, last dimension contiguous.
        reference: as ``x``, or None.
        format: a ``MessageFormat`` as a string.
        seed: for stochastic rounding.
        out: ``[R, nbytes]`` or ``[P, Q, nbytes]`` uint8.
        skip: row of ``x``, then ``[R + 1, N]``, to leave out.
    """
    if relaunch_quantize(x, reference, format, seed, out, skip):
        return
    fmt = parse_format(format)
    check_rows("x", x)
    if reference is not None:
        check_rows("reference", reference)
    check_message("out", out, fmt.layout(x.shape[-1]).nbytes)
    key = _quantize_key(x, reference, format, out, skip)
    _compute("quantize", key, out, x, reference, fmt, seed, out, skip)


def _new_message(rows: int, numel: int, format: str, device: torch.device) -> Tensor:
    nbytes = parse_format(format).layout(numel).nbytes
    return torch.empty(rows, nbytes, dtype=torch.uint8, device=device)


def _fake_quantize(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    return _new_message(x.shape[0], x.shape[1], format, x.device)


def _quantize(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    out = _fake_quantize(x, reference, format, seed)
    _quantize_out(x, reference, format, seed, out)
    return out


def _dequantize_key(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> Hashable:
    return "dequantize", tensor_key(message), numel, format, scale, add, tensor_key(out)


def relaunch_dequantize(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> bool:
    """Repeat ``dequantize_out``."""
    return _relaunch(_dequantize_key(message, numel, format, scale, add, out), out, message)


def _dequantize_out(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> None:
    """Decode messages, sum them and write or add ``scale`` times the sum to ``out``.

    Args:
        message: ``[K, R, nbytes]`` or ``[K, P, Q, nbytes]`` uint8.
        numel: values in a row.
        format: a ``MessageFormat`` as a string.
        scale: factor of the sum.
        add: add to ``out`` in fp32, rounded once, instead of overwriting it.
        out: ``[R, numel]`` or ``[P, Q, numel]`` fp32, bf16 or fp16, last dimension contiguous.
    """
    if relaunch_dequantize(message, numel, format, scale, add, out):
        return
    fmt = parse_format(format)
    check_message("message", message, fmt.layout(numel).nbytes)
    check_rows("out", out)
    key = _dequantize_key(message, numel, format, scale, add, out)
    _compute("dequantize", key, out, message, numel, fmt, scale, add, out)


def _fake_dequantize(
    message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype
) -> Tensor:
    return torch.empty(message.shape[1], numel, dtype=dtype, device=message.device)


def _dequantize(
    message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype
) -> Tensor:
    out = _fake_dequantize(message, numel, format, scale, dtype)
    _dequantize_out(message, numel, format, scale, False, out)
    return out


def _requantize_key(
    message: Tensor, numel: int, source: str, target: str, out: Tensor, skip: int | None
) -> Hashable:
    return "requantize", tensor_key(message), numel, source, target, tensor_key(out), skip


def relaunch_requantize(
    message: Tensor,
    numel: int,
    source: str,
    target: str,
    seed: int,
    out: Tensor,
    skip: int | None,
) -> bool:
    """Repeat ``requantize_out``."""
    key = _requantize_key(message, numel, source, target, out, skip)
    return _relaunch(key, out, message, None, words=seed_words(seed))


def _requantize_out(
    message: Tensor,
    numel: int,
    source: str,
    target: str,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Sum messages of format ``source`` and encode the sum in format ``target``.

    Args:
        message: ``[K, R, nbytes]`` uint8.
        numel: values in a row.
        source: format of ``message``, a ``MessageFormat`` as a string.
        target: format of ``out``.
        seed: for stochastic rounding in ``target``.
        out: ``[R, nbytes]`` uint8.
        skip: row of ``message``, then ``[K, R + 1, nbytes]``, to leave out.
    """
    if relaunch_requantize(message, numel, source, target, seed, out, skip):
        return
    formats = parse_format(source), parse_format(target)
    check_message("message", message, formats[0].layout(numel).nbytes)
    check_message("out", out, formats[1].layout(numel).nbytes)
    key = _requantize_key(message, numel, source, target, out, skip)
    _compute("requantize", key, out, message, numel, *formats, seed, out, skip)


def _fake_requantize(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    return _new_message(message.shape[1], numel, target, message.device)


def _requantize(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    out = _fake_requantize(message, numel, source, target, seed)
    _requantize_out(message, numel, source, target, seed, out)
    return out


def _accumulate_key(message: Tensor, added: Tensor, format: str) -> Hashable:
    return "accumulate", tensor_key(message), tensor_key(added), format


def relaunch_accumulate(message: Tensor, added: Tensor, format: str, seed: int) -> bool:
    """Repeat ``accumulate_``."""
    key = _accumulate_key(message, added, format)
    return _relaunch(key, message, message[None], added, words=seed_words(seed))


def _accumulate(message: Tensor, added: Tensor, format: str, seed: int) -> None:
    """Add to encoded values: decoded, added and encoded in fp32, in one pass and in place.

    Args:
        message: ``[R, nbytes]`` uint8.
        added: ``[R, N]`` fp32, bf16 or fp16, last dimension contiguous.
        format: a ``MessageFormat`` as a string, with groups.
        seed: for stochastic rounding.
    """
    if relaunch_accumulate(message, added, format, seed):
        return
    fmt, numel = parse_format(format), added.shape[-1]
    if not fmt.group_size:
        raise NotImplementedError(
            f"format={format!r} has one scale per row, which is not known before the whole row is "
            "added up. Decode, add and encode, or choose a group_size of 16 to 4096."
        )
    check_message("message", message, fmt.layout(numel).nbytes)
    # different programs would read and overwrite the same bytes
    if message.shape[0] > 1 and message.stride(0) < message.shape[1]:
        raise ValueError(
            f"message has rows of {message.shape[1]} bytes {message.stride(0)} bytes apart; rows "
            "that are overwritten must not share memory. Pass message.clone()."
        )
    check_rows("added", added)
    key, messages = _accumulate_key(message, added, format), message[None]
    _compute("requantize", key, message, messages, numel, fmt, fmt, seed, message, None, added)


quantize_out = define_operator(
    "quantize_out(Tensor x, Tensor? reference, str format, int seed, Tensor(a!) out, "
    "int? skip=None) -> ()",
    _quantize_out,
)
quantize = define_operator(
    "quantize(Tensor x, Tensor? reference, str format, int seed) -> Tensor",
    _quantize,
    _fake_quantize,
)
dequantize_out = define_operator(
    "dequantize_out(Tensor message, int numel, str format, float scale, bool add, Tensor(a!) out)"
    " -> ()",
    _dequantize_out,
)
dequantize = define_operator(
    "dequantize(Tensor message, SymInt numel, str format, float scale, ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
requantize_out = define_operator(
    "requantize_out(Tensor message, int numel, str source, str target, int seed, Tensor(a!) out, "
    "int? skip=None) -> ()",
    _requantize_out,
)
requantize = define_operator(
    "requantize(Tensor message, int numel, str source, str target, int seed) -> Tensor",
    _requantize,
    _fake_requantize,
)
accumulate_ = define_operator(
    "accumulate_(Tensor(a!) message, Tensor added, str format, int seed) -> ()", _accumulate
)
