"""The Triton kernels produce the bits of the torch reference, also of strided and skipped rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from lq_testing.codec_data import awkward_rows, make_format
from lq_testing.interpreter import skip_old_interpreter

from lq_lightning.data_parallel import WeightQuantization
from lq_lightning.kernels.message import CODES, MessageFormat
from lq_lightning.kernels.message import reference as reference_rows
from lq_lightning.kernels.message.format import CELLS_PER_UNIT
from lq_lightning.kernels.message.launch import INT_TO_FLOAT, UNROLLED_MESSAGES, Tile
from lq_lightning.kernels.message.triton_rows import decode_tile, encode_tile

# the interpreter computes with numpy, which warns where IEEE arithmetic is silent
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]

KINDS = [(code, True) for code in CODES] + [
    (code, False) for code, entry in CODES.items() if entry.kind == "integer"
]
# More than a whole tile of the interpreter, and an incomplete one.
NUMEL = 1024 + 333
SCALES = ("float32", "bfloat16", "float16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_same_floats(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, except that any NaN equals any NaN."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    integer = torch.int32 if expected.dtype == torch.float32 else torch.int16
    both = [value.contiguous().nan_to_num(nan=0.0).view(integer) for value in (actual, expected)]
    assert torch.equal(*both)


def check_quantize(
    x: torch.Tensor,
    fmt: MessageFormat,
    device: torch.device,
    reference: torch.Tensor | None = None,
    seed: int = 3,
) -> torch.Tensor:
    from lq_lightning.kernels.message.triton_kernels import launch_quantize

    shape = (x.shape[0], fmt.layout(x.shape[1]).nbytes)
    expected = torch.full(shape, 0xFF, dtype=torch.uint8)
    reference_rows.quantize(x, reference, fmt, seed, expected)
    actual = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
    other = None if reference is None else reference.to(device)
    launch_quantize(x.to(device), other, fmt, seed, actual)
    assert torch.equal(actual.cpu(), expected)
    return expected


def check_dequantize(
    message: torch.Tensor,
    numel: int,
    fmt: MessageFormat,
    device: torch.device,
    *,
    scale: float = 1.0,
    base: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    from lq_lightning.kernels.message.triton_kernels import launch_dequantize

    add = base is not None
    expected = torch.full((message.shape[1], numel), float("nan"), dtype=dtype)
    if base is not None:
        expected = base.clone()
    actual = expected.to(device, copy=True)
    reference_rows.dequantize(message, numel, fmt, scale, add, expected)
    launch_dequantize(message.to(device), numel, fmt, scale, add, actual)
    assert_same_floats(actual, expected)
    return expected


def check_requantize(
    message: torch.Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    device: torch.device,
    added: torch.Tensor | None = None,
) -> None:
    """With ``added``, the sum replaces the message."""
    from lq_lightning.kernels.message.triton_kernels import launch_requantize

    shape = (message.shape[1], target.layout(numel).nbytes)
    expected = torch.full(shape, 0xFF, dtype=torch.uint8) if added is None else message[0].clone()
    actual = expected.to(device, copy=True)
    sources = (message, message.to(device)) if added is None else (expected[None], actual[None])
    reference_rows.requantize(sources[0], numel, source, target, 5, expected, None, added)
    added = None if added is None else added.to(device)
    launch_requantize(sources[1], numel, source, target, 5, actual, None, added)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("index", range(len(KINDS)), ids=["-".join(map(str, k)) for k in KINDS])
def test_every_code(index: int, turn: int, device: torch.device) -> None:
    """Each code twice: nearest and stochastic, without and with transform; the rest takes turns."""
    code, symmetric = KINDS[index]
    fmt = make_format(
        code,
        symmetric=symmetric,
        hadamard_size=(0, 32)[turn],
        stochastic=bool((index + turn) % 2) and CODES[code].kind != "table",
        scale_dtype=SCALES[(index + turn) % 3],
    )
    x = awkward_rows(2, NUMEL, 64, huge=not turn).to(DTYPES[index % 3])
    message = check_quantize(x, fmt, device)
    check_dequantize(message[None], NUMEL, fmt, device)


@pytest.mark.parametrize(
    ("code", "group_size", "changes"),
    [("int8", 128, {"hadamard_size": size, "symmetric": size != 64}) for size in (16, 64, 128)]
    + [("int8", 128, {"hadamard_size": 128, "symmetric": False})]
    + [
        ("int5", size, {"symmetric": False, "scale_dtype": "bfloat16"})
        for size in (16, 256, 1024, 4096)
    ],
)
def test_sizes_of_transforms_and_groups(
    code: str, group_size: int, changes: dict[str, object], device: torch.device
) -> None:
    fmt = make_format(code, group_size=group_size, **changes)
    numel = max(group_size, 1024) + 77
    message = check_quantize(awkward_rows(1, numel, group_size), fmt, device)
    check_dequantize(message[None], numel, fmt, device)


@pytest.mark.parametrize(
    ("code", "symmetric", "numel", "changes"),
    [
        ("int8", True, NUMEL, {}),
        ("int4", False, NUMEL, {"hadamard_size": 32, "stochastic": True}),
        ("fp8_e4m3", True, 77, {"hadamard_size": 16, "scale_dtype": "float16"}),
        ("int6", False, 77, {"scale_dtype": "bfloat16"}),
        ("nf4", True, 77, {}),
    ],
)
def test_one_scale_per_row(
    code: str, symmetric: bool, numel: int, changes: dict[str, object], device: torch.device
) -> None:
    fmt = make_format(code, group_size=0, symmetric=symmetric, **changes)
    x = torch.randn(3, numel)
    x[0] *= 1e38 / max(3.4, fmt.hadamard_size)
    x[1, -1] = float("nan")
    x[2] = 0
    message = check_quantize(x, fmt, device)
    values = check_dequantize(message[None], numel, fmt, device)
    assert values[1].isnan().all()
    assert values[[0, 2]].isfinite().all()
    check_requantize(message[1:, None], numel, fmt, make_format("int6", group_size=0), device)


def test_values_near_thresholds_of_a_table(device: torch.device) -> None:
    """And at the ends of cells."""
    fmt = make_format("nf4", group_size=1024)
    middles = torch.tensor(fmt.thresholds)
    ends = (torch.arange(-15, 16) + 0.5) / CELLS_PER_UNIT
    points = torch.cat([middles, ends, torch.tensor(fmt.parameters.levels)])
    bits = points.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    x = bits.view(torch.float32).flatten().clamp(-1, 1)
    check_quantize(torch.cat([x, torch.ones(1)])[None], fmt, device)  # a scale of 1


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 65, 1023, 1024, 1025, 2048])
def test_sizes(numel: int, device: torch.device) -> None:
    fmt = make_format(
        "int7", symmetric=False, hadamard_size=16, stochastic=True, scale_dtype="float16"
    )
    message = check_quantize(awkward_rows(2, numel, 64), fmt, device)
    check_dequantize(message[None], numel, fmt, device)
    check_requantize(message[:, None], numel, fmt, make_format("int3"), device)


def test_no_rows(device: torch.device) -> None:
    message = check_quantize(torch.zeros(0, 100), make_format(), device)
    check_dequantize(message[None], 100, make_format(), device)
    check_requantize(message[None], 100, make_format(), make_format("int8"), device)


@pytest.mark.parametrize(
    ("dtype", "reference_dtype"),
    [(DTYPES[i], DTYPES[(i + shift) % 3]) for i in range(3) for shift in (0, 1)],
)
def test_differences(
    dtype: torch.dtype, reference_dtype: torch.dtype, device: torch.device
) -> None:
    fmt = make_format("int4", group_size=256)
    x = awkward_rows(2, NUMEL, 64).to(dtype)
    reference = (x.float() + 1e-2 * torch.randn(2, NUMEL)).to(reference_dtype)
    check_quantize(x, fmt, device, reference)


def test_weight_differences_in_the_default_codec(device: torch.device) -> None:
    """Difference, codes and sum; a run that ends within a group; what is not finite stays so."""
    fmt = WeightQuantization().codec().message_format
    x = awkward_rows(2, NUMEL, fmt.group_size).to(torch.bfloat16)
    x[0, [3, -1]] = torch.tensor([float("nan"), float("inf")], dtype=x.dtype)
    reference = (x.float().nan_to_num(0, 0) + 1e-2 * torch.randn(2, NUMEL)).to(torch.bfloat16)
    reference[1, :128] = x[1, :128]  # weights that did not change
    message = check_quantize(x, fmt, device, reference)
    added = check_dequantize(
        message[None], NUMEL, fmt, device, base=reference, dtype=torch.bfloat16
    )
    assert NUMEL % 128
    for group in (slice(128), slice(NUMEL // 128 * 128, NUMEL)):
        assert added[0, group].isnan().all()
    assert torch.equal(added[1, :128], x[1, :128])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_output_dtypes_and_add(dtype: torch.dtype, add: bool, device: torch.device) -> None:
    fmt = make_format("int4", hadamard_size=32)
    message = check_quantize(torch.randn(2, NUMEL), fmt, device)
    base = torch.randn(2, NUMEL).to(dtype) if add else None
    check_dequantize(message[None], NUMEL, fmt, device, base=base, dtype=dtype)


@pytest.mark.parametrize("num_messages", [2, 3, 5, 8, 9, 33])
def test_any_number_of_messages(num_messages: int, device: torch.device) -> None:
    fmt = make_format("int8", group_size=16, hadamard_size=16 if num_messages % 2 else 0)
    numel = NUMEL if num_messages == 5 else 100
    message = torch.empty(num_messages, fmt.layout(numel).nbytes, dtype=torch.uint8)
    reference_rows.quantize(awkward_rows(num_messages, numel, 16), None, fmt, 0, message)
    message = message[:, None]
    check_dequantize(message, numel, fmt, device, scale=1 / 3)
    if num_messages in (3, 9):
        check_requantize(message, numel, fmt, make_format("int4", stochastic=True), device)


class Launches:
    """In place of a kernel: keeps the constants that it would be compiled for."""

    def __init__(self) -> None:
        self.constants: list[dict[str, object]] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *values, **constants: self.constants.append(constants)


def test_large_numbers_of_messages_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from lq_lightning.kernels.message import triton_kernels

    fmt = make_format()
    row = torch.zeros(1, fmt.layout(64).nbytes, dtype=torch.uint8)
    kinds: list[str] = []

    def choose(kind: str, *rest: object) -> Tile:
        kinds.append(kind)
        return Tile(1024, 32, 4, 2)

    monkeypatch.setattr(triton_kernels, "choose_tile", choose)
    for name in ("dequantize", "requantize"):
        launches = Launches()
        monkeypatch.setattr(triton_kernels, f"{name}_rows_kernel", launches)
        for count in (UNROLLED_MESSAGES, UNROLLED_MESSAGES + 1, 33, 128):
            messages = row.expand(count, 1, -1)
            if name == "dequantize":
                out = torch.zeros(1, 64)
                triton_kernels.launch_dequantize(messages, 64, fmt, 1.0, False, out)
            else:
                triton_kernels.launch_requantize(messages, 64, fmt, fmt, 0, row)
        few, *many = launches.constants
        assert all(constants == many[0] for constants in many)
        assert few != many[0]
    assert kinds == [*["reduce 32"] * 4, "requantize", *["requantize many"] * 3]


@pytest.mark.gpu
def test_large_numbers_of_messages_are_compiled_once() -> None:
    from lq_lightning.kernels.message.triton_kernels import dequantize_rows_kernel

    fmt, compiled = make_format("int2", group_size=32), []
    row = torch.zeros(1, fmt.layout(64).nbytes, dtype=torch.uint8)
    for count in (9, 33, 48, 128):
        check_dequantize(row.repeat(count, 1)[:, None], 64, fmt, torch.device("cuda"))
        compiled.append(sum(len(c[0]) for c in dequantize_rows_kernel.device_caches.values()))
    assert len(set(compiled)) == 1


@pytest.mark.parametrize(
    ("source_size", "target_size", "stochastic"),
    [(32, 32, True), (0, 0, False), (0, 32, False), (64, 0, True), (16, 128, True)],
)
def test_requantize(
    source_size: int, target_size: int, stochastic: bool, device: torch.device
) -> None:
    source = make_format("int8", symmetric=False, hadamard_size=source_size, scale_dtype="float16")
    target = make_format("int4", group_size=128, hadamard_size=target_size, stochastic=stochastic)
    message = check_quantize(awkward_rows(2, NUMEL, 64), source, device).view(2, 1, -1)
    check_requantize(message, NUMEL, source, target, device)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("int8", {"group_size": 32}),
        ("int5", {"symmetric": False, "hadamard_size": 32, "scale_dtype": "bfloat16"}),
        ("int6", {"hadamard_size": 64, "stochastic": True}),
        ("fp8_e4m3", {"group_size": 128}),
    ],
)
def test_values_are_added_in_place(
    code: str, changes: dict[str, object], device: torch.device
) -> None:
    fmt = make_format(code, **changes)
    message = check_quantize(awkward_rows(2, NUMEL, 64), fmt, device)
    for dtype in (torch.float32, torch.bfloat16):
        added = awkward_rows(2, NUMEL, 32).to(dtype)
        check_requantize(message[None], NUMEL, fmt, fmt, device, added)


@pytest.mark.parametrize("seed", [-1, 2**62 + 12345])
def test_seeds(seed: int, device: torch.device) -> None:
    check_quantize(torch.randn(3, 700), make_format("int3", stochastic=True), device, seed=seed)


@pytest.mark.parametrize("offset", [1, 8])
def test_strided_rows(offset: int, device: torch.device) -> None:
    from lq_lightning.kernels.message.triton_kernels import launch_dequantize, launch_quantize

    fmt = make_format("int6", hadamard_size=16)
    nbytes = fmt.layout(1200).nbytes
    wide = torch.randn(3, 1300)
    expected = torch.full((3, nbytes), 0xFF, dtype=torch.uint8)
    reference_rows.quantize(wide[:, offset : offset + 1200], None, fmt, 0, expected)
    rows = torch.full((3, nbytes + 48), 0xAB, dtype=torch.uint8, device=device)
    on_device = wide.to(device)[:, offset : offset + 1200]
    launch_quantize(on_device, None, fmt, 0, rows[:, 16 : 16 + nbytes])
    assert torch.equal(rows[:, 16 : 16 + nbytes].cpu(), expected)
    assert (rows[:, :16] == 0xAB).all()
    assert (rows[:, 16 + nbytes :] == 0xAB).all()

    target = torch.full((3, 1300), 7.0)
    decoded = target.to(device, copy=True)
    reference_rows.dequantize(
        expected[None], 1200, fmt, 1.0, False, target[:, offset : offset + 1200]
    )
    launch_dequantize(
        rows[None, :, 16 : 16 + nbytes], 1200, fmt, 1.0, False, decoded[:, offset : offset + 1200]
    )
    assert_same_floats(decoded, target)


def test_strided_messages(device: torch.device) -> None:
    fmt = make_format("int4", group_size=128)
    wide = check_quantize(torch.randn(6, 900), fmt, device).view(2, 3, -1)
    check_dequantize(wide.transpose(0, 1), 900, fmt, device)
    check_requantize(wide.transpose(0, 1), 900, fmt, fmt, device)


@pytest.mark.parametrize("count", [5, UNROLLED_MESSAGES, UNROLLED_MESSAGES + 1])
def test_sums_of_negative_zeros(count: int, device: torch.device) -> None:
    fmt = make_format("fp8_e4m3")
    messages = check_quantize(torch.full((count, NUMEL), -0.0), fmt, device)[:, None]
    decoded = check_dequantize(messages, NUMEL, fmt, device)
    assert decoded.signbit().all()


@triton.jit
def _copy_row_kernel(
    source_ptr, out_ptr, width, numel, int_to_float, BLOCK: tl.constexpr, FORMAT: tl.constexpr
):
    """Decode and encode columns ``width * i`` to ``width * (i + 1)``, as a tile of its own."""
    # backwards, so that what a tile writes beyond its end lands on what the next has written
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * width
    limit = start + width
    x = decode_tile(source_ptr, start, limit, numel, int_to_float, BLOCK, 8, FORMAT, False)
    x = tl.where(tl.arange(0, BLOCK) < width, x, 0.0)
    seed = tl.program_id(0) * 0
    encode_tile(
        *(x, out_ptr, out_ptr, tl.cast(0, tl.int64), start, limit, numel, seed, seed),
        *(BLOCK, FORMAT, 1.0, False),
    )


@pytest.mark.parametrize("code", ["int7", "int3", "fp8_e4m3", "nf4"])
def test_tiles_begin_and_end_anywhere(code: str, device: torch.device) -> None:
    """As kernels do that work on rows of a matrix which are one row of a message."""
    rows, width = 3, 5 * 16
    symmetric = code != "int7"
    fmt = make_format(code, group_size=16, symmetric=symmetric, scale_dtype="bfloat16")
    message = torch.full((1, fmt.layout(rows * width).nbytes), 0xFF, dtype=torch.uint8)
    reference_rows.quantize(torch.randn(1, rows * width), None, fmt, 0, message)
    # what a decoded message is encoded to: scales and minima are rounded, so not always itself
    values = torch.empty(1, rows * width)
    reference_rows.dequantize(message[None], rows * width, fmt, 1.0, False, values)
    expected = torch.full_like(message, 0xFF)
    reference_rows.quantize(values, None, fmt, 0, expected)
    actual = torch.full_like(message, 0xFF).to(device)
    _copy_row_kernel[(rows,)](
        *(message.to(device), actual, width, rows * width, INT_TO_FLOAT),
        **{"BLOCK": 128, "FORMAT": fmt, "enable_fp_fusion": False},
    )
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("group_size", [64, 0])
def test_rows_of_two_strides(group_size: int, device: torch.device) -> None:
    """Rows ordered by node on one side of a message, by local rank on the other."""
    from lq_lightning.kernels.message.triton_kernels import launch_dequantize, launch_quantize

    fmt = make_format("int6", hadamard_size=16, stochastic=True, group_size=group_size)
    nbytes = fmt.layout(1200).nbytes
    wide = torch.randn(12, 1300)
    expected = torch.full((12, nbytes), 0xFF, dtype=torch.uint8)
    reference_rows.quantize(wide[:, 8:1208], None, fmt, 3, expected)
    x = wide.to(device).view(3, 4, 1300)[..., 8:1208]
    messages = torch.full((4, 3, nbytes), 0xFF, dtype=torch.uint8, device=device)
    launch_quantize(x, None, fmt, 3, messages.transpose(0, 1))
    assert torch.equal(messages.transpose(0, 1).reshape(12, nbytes).cpu(), expected)
    messages.fill_(0xFF)
    reference_rows.quantize(x.cpu(), None, fmt, 3, on_cpu := messages.cpu().transpose(0, 1))
    assert torch.equal(on_cpu.reshape(12, nbytes), expected)

    target = torch.full((12, 1300), 7.0)
    decoded = torch.full((4, 3, 1300), 7.0, device=device).transpose(0, 1)
    twice = expected.expand(2, -1, -1)
    reference_rows.dequantize(twice, 1200, fmt, 0.5, True, target[:, 8:1208])
    in_order = on_cpu.to(device).expand(2, -1, -1, -1)
    launch_dequantize(in_order, 1200, fmt, 0.5, True, decoded[..., 8:1208])
    assert torch.equal(decoded.reshape(12, 1300).cpu(), target)
    again = torch.full((3, 4, 1300), 7.0)
    reference_rows.dequantize(in_order.cpu(), 1200, fmt, 0.5, True, again[..., 8:1208])
    assert torch.equal(again.view(12, 1300), target)


def test_too_many_rows_of_two_strides() -> None:
    from lq_lightning.kernels.message.launch import RowSteps

    assert RowSteps.of(torch.empty(1, 70000, 16)).rows == 70000
    with pytest.raises(ValueError, match="65535"):
        RowSteps.of(torch.empty(2, 70000, 16))


@pytest.mark.parametrize("skip", [0, 3, 4])
def test_a_row_is_left_out(skip: int, device: torch.device) -> None:
    from lq_lightning.kernels.message.triton_kernels import launch_quantize, launch_requantize

    source, target = make_format("int8"), make_format(stochastic=True)
    x = torch.randn(5, NUMEL)
    kept = [row for row in range(5) if row != skip]
    messages = torch.empty(10, source.layout(NUMEL).nbytes, dtype=torch.uint8)
    reference_rows.quantize(torch.cat((x, -2 * x)), None, source, 0, messages)
    messages = messages.view(2, 5, -1)
    rows = torch.full((4, target.layout(NUMEL).nbytes), 0xFF, dtype=torch.uint8)
    for reference, launch, whole in (
        (reference_rows.quantize, launch_quantize, x),
        (reference_rows.requantize, launch_requantize, messages),
    ):
        results = []
        for run, values, place, left_out in (
            (reference, whole[..., kept, :], torch.device("cpu"), None),
            (reference, whole, torch.device("cpu"), skip),
            (launch, whole.to(device), device, skip),
        ):
            out = rows.to(place, copy=True)
            if launch is launch_quantize:
                run(values, None, target, 5, out, left_out)
            else:
                run(values, NUMEL, source, target, 5, out, left_out)
            results.append(out.cpu())
        assert torch.equal(results[1], results[0])
        assert torch.equal(results[2], results[0])
