"""The optimizer step: Triton against the reference, rounding of bf16, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.message.reference import packed_seed_words, seed_words
from lq_lightning.kernels.optimizer_step import reference
from lq_lightning.kernels.optimizer_step.formats import (
    FORMATS,
    GROUP_SIZE,
    RULES,
    StateFormat,
    codebook,
    groups_per_row,
    row_length,
    state_format,
)
from lq_lightning.kernels.optimizer_step.op import optimizer_step, prepare
from lq_lightning.kernels.optimizer_step.reference import State

in_triton = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]
SCALARS = [0.9, 0.1, 0.95, 0.05, 1e-8, 0.0, 0.999, 1e-2]


def formats(rule: str, name: str) -> list[StateFormat]:
    first = state_format(name, signed=True)
    return [first, state_format(name, signed=False)] if rule.startswith("adam") else [first]


def zeros(shape: tuple[int, ...], fmt: StateFormat, device: torch.device | str) -> State:
    if not fmt.quantized:
        return State(torch.zeros(shape, device=device), None, None)
    constants = (shape[0], groups_per_row(row_length(shape), fmt.group_size))
    return State(
        torch.zeros(shape, dtype=torch.uint8, device=device),
        torch.zeros(constants, dtype=torch.bfloat16, device=device),
        torch.full(constants, 7, dtype=torch.uint8, device=device) if fmt.expanded else None,
    )


def parts(param: Tensor, states: list[State]) -> list[Tensor]:
    found = [param]
    for state in states:
        found += [t for t in (state.codes, state.scale, state.exponent) if t is not None]
    return found


def gradients(shape: tuple[int, ...], step: int) -> Tensor:
    """Of many magnitudes, with a group of zeros; the third ones with NaN and infinity."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp(3 * torch.randn(shape, generator=generator))
    values[0] = 0
    values[1].view(-1)[:4] = torch.tensor([1e-39, -1e-41, -0.0, 1e-38])
    if step == 3:
        values[-1].view(-1)[-1] = float("nan")
        values[2].view(-1)[0] = float("-inf")
    return values


def assert_same(actual: Tensor | None, expected: Tensor | None) -> None:
    """Equal bits, except that any NaN equals any NaN."""
    if expected is None:
        assert actual is None
        return
    assert actual is not None
    actual = actual.cpu()
    if expected.is_floating_point():
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = actual.nan_to_num(nan=1.25), expected.nan_to_num(nan=1.25)
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(actual, expected)


def check_steps(
    rule: str,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    shapes: list[tuple[int, ...]],
    place: Callable[[Tensor, int], Tensor] = lambda grad, step: grad,
    **options: int,
) -> None:
    """Three steps; ``place`` may put gradients elsewhere."""
    from lq_lightning.kernels.optimizer_step.triton_kernels import launch_optimizer_step

    chosen = formats(rule, name)
    stochastic = dtype == torch.bfloat16
    expected = [torch.randn(shape).to(dtype) for shape in shapes]
    actual = [param.to(device, copy=True) for param in expected]
    states = [[zeros(shape, fmt, "cpu") for fmt in chosen] for shape in shapes]
    device_states = [[zeros(shape, fmt, device) for fmt in chosen] for shape in shapes]
    scalars = torch.tensor([SCALARS] * len(shapes))
    seeds = [7 + i for i in range(len(shapes))]
    first_groups = [i << 33 for i in range(len(shapes))]
    prepared = [
        prepare(parts(param, entry), chosen)
        for param, entry in zip(actual, device_states, strict=True)
    ]
    for step in range(1, 4):
        grads = [gradients(shape, step).to(dtype) for shape in shapes]
        if dtype == torch.bfloat16:  # Triton's interpreter misreads subnormal bf16
            grads = [g.masked_fill(g.abs() < 2.0**-126, 0) for g in grads]
        for index, param in enumerate(expected):
            reference.step(
                param,
                grads[index],
                states[index],
                scalars[index].tolist(),
                seeds[index],
                first_groups[index],
                rule,
                chosen,
                stochastic,
            )
        launch_optimizer_step(
            prepared,
            [place(grad.to(device), step) for grad in grads],
            scalars,
            seeds,
            first_groups,
            rule,
            stochastic,
            **options,
        )
        for index, param in enumerate(expected):
            assert_same(actual[index], param)
            for one, other in zip(device_states[index], states[index], strict=True):
                assert_same(one.codes, other.codes)
                assert_same(one.scale, other.scale)
                assert_same(one.exponent, other.exponent)


class TestTriton:
    pytestmark = in_triton

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_formats(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        rule = "nesterov" if name == "int8" else "adamw"  # int8 has signs
        check_steps(rule, name, dtype, device, [(3, 128), (3, 1, 50)])

    @pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adamw"])
    def test_rules(self, rule: str, device: torch.device) -> None:
        """The second tensor is that of two programs, which end within a tile and with one."""
        shapes: list[tuple[int, ...]] = [(3, 128), (3, 130)]
        check_steps(rule, "expanded_fp8", torch.float32, device, shapes, per_program=4)

    def test_gradients_move(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are aligned in some steps and not in others, as views into a buffer may be."""
        from lq_lightning.kernels.optimizer_step import triton_kernels as launch

        aligned: list[bool] = []
        kernel = launch.optimizer_step_kernel

        class Recorder:
            def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
                def run(*args: Any, **kwargs: Any) -> None:
                    aligned.append(kwargs["ALIGNED"])
                    kernel[grid](*args, **kwargs)

                return run

        monkeypatch.setattr(launch, "optimizer_step_kernel", Recorder())

        def place(grad: Tensor, step: int) -> Tensor:
            buffer = torch.empty(grad.numel() + 4, device=device)
            start = int(step != 2)
            view = buffer[start : start + grad.numel()].view_as(grad)
            return view.copy_(grad)

        shapes: list[tuple[int, ...]] = [(3, 128), (4, 128)]
        check_steps("adamw", "expanded_fp8", torch.float32, device, shapes, place)
        assert aligned == [False, True, False]

    @pytest.mark.gpu(1)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("rule", RULES)
    def test_many_elements(self, rule: str, name: str, dtype: torch.dtype) -> None:
        if name == "int8" and rule.startswith("adam"):
            pytest.skip("int8 is for one state")
        shapes: list[tuple[int, ...]] = [(512, 1024), (67, 200), (3, 40, 32), (1031, 129)]
        check_steps(rule, name, dtype, torch.device("cuda"), shapes)

    @pytest.mark.gpu(1)
    @pytest.mark.parametrize("options", [(1, 1), (3, 1), (4, 2), (8, 8), (4, 4), (64, 32)])
    @pytest.mark.parametrize(("rule", "name"), [("adamw", "expanded_fp8"), ("sgd", "int8")])
    def test_programs_of_any_size(self, rule: str, name: str, options: tuple[int, int]) -> None:
        per_program, at_once = options
        if name == "int8" and at_once < 4:
            pytest.skip("a tile has 128 elements or more")
        check_steps(
            rule,
            name,
            torch.float32,
            torch.device("cuda"),
            [(5, 384), (7, 128), (9, 100)],
            per_program=per_program,
            at_once=at_once,
        )


# --- stochastic rounding ----------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased_and_exact_on_bf16() -> None:
    x = torch.full((1 << 9, 128), 1.0 + 2.0**-9)
    noise = reference.rounding_noise(3, 1 << 33, len(x), 0, x.device)
    rounded = reference.round_stochastically(x, noise).float()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    # a quarter of the way; 7 standard deviations
    assert abs((rounded > 1).float().mean() - 0.25) < 7 * math.sqrt(0.1875 / x.numel())
    kept = torch.randn(32, 128).bfloat16()
    noise = noise[:32]
    assert torch.equal(reference.round_stochastically(kept.float(), noise), kept)
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    result = reference.round_stochastically(special, torch.full((3,), 0xFFFFFFFF))
    assert_same(result, special.bfloat16())


def test_seeds_of_many_tensors() -> None:
    seeds = [0, 1, 7 << 32, (1 << 63) - 1, -1, 123456789123456789]
    packed = packed_seed_words(torch.tensor(seeds)).tolist()
    for seed, both in zip(seeds, packed, strict=True):
        low, high = seed_words(seed)
        assert (high << 32) | (low & 0xFFFFFFFF) == both


def test_parts_of_narrow_rows_are_as_large_as_others() -> None:
    """Rows are padded to whole groups, whatever their length: temporary memory counts those."""
    parts = reference._chunks(torch.empty(1 << 12, 3, device="meta"))
    assert max(part.stop - part.start for part, _ in parts) * GROUP_SIZE <= reference._CHUNK_NUMEL


def test_tables_do_not_depend_on_the_default_device() -> None:
    fmt, cpu = state_format("dynamic8", signed=True), torch.device("cpu")
    with torch.device("meta"):
        actual = codebook.__wrapped__(fmt, cpu)
    assert torch.equal(actual, codebook(fmt, cpu))


# --- what is refused --------------------------------------------------------------------------


def arguments(name: str = "expanded_fp8") -> dict[str, Any]:
    chosen = formats("adamw", name)
    tensors = [
        parts(torch.randn(shape), [zeros(shape, fmt, "cpu") for fmt in chosen])
        for shape in [(3, 128), (2, 40)]
    ]
    return {
        "tensors": tensors,
        "prepared": [prepare(each, chosen) for each in tensors],
        "grads": [torch.randn(each[0].shape) for each in tensors],
        "scalars": torch.tensor([SCALARS] * 2),
        "seeds": [0, 0],
        "first_groups": [0, 0],
        "rule": "adamw",
        "stochastic": False,
    }


@pytest.mark.parametrize("name", ["expanded_fp8", "float32"])
def test_writes_are_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "step", lambda *_: None)  # it counts as any operator of torch
    values = arguments(name)
    before = [[tensor._version for tensor in each] for each in values["tensors"]]
    optimizer_step(**values)
    after = [[tensor._version - 1 for tensor in each] for each in values["tensors"]]
    assert after == before
    with torch.inference_mode():
        optimizer_step(**arguments(name))


def test_bad_arguments_are_refused() -> None:
    from lq_lightning.kernels.optimizer_step.triton_kernels import launch_optimizer_step

    values = arguments()
    with pytest.raises(ValueError, match=r"rule='rmsprop' is not known; allowed: adamw"):
        optimizer_step(**{**values, "rule": "rmsprop"})
    with pytest.raises(ValueError, match=r"per_program=3 must be a multiple of at_once=2"):
        launch_optimizer_step(
            values["prepared"], [], torch.empty(0, 8), [], [], "adamw", False, 3, 2
        )
    with pytest.raises(ValueError, match=r"2 states were prepared; 'lion' has 1"):
        optimizer_step(**{**values, "rule": "lion"})
    with pytest.raises(ValueError, match=r"grads has 1 entries for 2 parameters"):
        optimizer_step(**{**values, "grads": values["grads"][:1]})
    with pytest.raises(ValueError, match=r"scalars is torch.float32 \(1, 8\); expected"):
        optimizer_step(**{**values, "scalars": values["scalars"][:1]})
    grads = [values["grads"][0].double(), values["grads"][1].double()]
    with pytest.raises(ValueError, match=r"grads is torch.float64 .*expected a contiguous tensor"):
        optimizer_step(**{**values, "grads": grads})
    mixed_grads = [values["grads"][0], values["grads"][1].bfloat16()]
    with pytest.raises(ValueError, match=r"torch.bfloat16 and .* torch.float32 cannot share"):
        optimizer_step(**{**values, "grads": mixed_grads})
    with pytest.raises(ValueError, match=r"grads is .*\(128, 3\).* expected .*\(3, 128\)"):
        optimizer_step(**{**values, "grads": [grads[0].float().t(), values["grads"][1]]})
    others = arguments("dynamic8")
    mixed = [values["prepared"][0], others["prepared"][1]]
    with pytest.raises(ValueError, match=r"expanded_fp8.* cannot share a step"):
        optimizer_step(**{**values, "prepared": mixed})


def test_bad_tensors_are_refused() -> None:
    chosen = formats("adamw", "expanded_fp8")
    param, *rest = arguments()["tensors"][0]
    with pytest.raises(ValueError, match=r"state format 'fp4' is not known; allowed"):
        state_format("fp4", signed=True)
    with pytest.raises(ValueError, match=r"5 tensors for .*; expected first, first_scale, first_e"):
        prepare([param, *rest[:-1]], chosen)
    with pytest.raises(ValueError, match=r"param is .*expected a contiguous tensor"):
        prepare([param.t(), *rest], chosen)
    with pytest.raises(ValueError, match=r"param is torch.float16"):
        prepare([param.half(), *rest], chosen)
    with pytest.raises(ValueError, match=r"no dimensions; pass a view of shape \(1,\)"):
        prepare([param[0, 0], *rest], chosen)
    with pytest.raises(ValueError, match=r"first is torch.int8 .*expected .*torch.uint8"):
        prepare([param, rest[0].view(torch.int8), *rest[1:]], chosen)
    even = [state_format("int8", signed=True), chosen[1]]
    with pytest.raises(ValueError, match=r"states in int8 and expanded_fp8 have groups of diff"):
        prepare([param, *rest], even)
    with pytest.raises(ValueError, match=r"first_scale is on meta, its parameter on cpu"):
        prepare([param, rest[0], rest[1].to("meta"), *rest[2:]], chosen)
