"""Memory budgets: what they choose, and that it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from lq_testing.small_llama import SmallLlama, tokens
from torch import Tensor, nn

from lq_lightning.activations import (
    ActivationCalibration,
    ActivationPlan,
    MemoryBudget,
    calibrate_activations,
    plan_activations,
    quantize_activations,
)
from lq_lightning.activations.budget import allocate, cost_of, least_nbytes
from lq_lightning.activations.calibration import (
    CodecMeasurement,
    KeptTensors,
    Saver,
    SiteCalibration,
    UnitCalibration,
)

CODECS = ("int4", "int5", "int8")


def build(layers: int = 3) -> tuple[SmallLlama, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = SmallLlama(layers)
    return model, lambda: model(tokens())


@pytest.fixture(scope="module")
def calibrated() -> ActivationCalibration:
    return calibrate_activations(*build(), CODECS)


def really_kept(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes that autograd holds, counted with nothing of the library."""
    held: dict[int, Tensor] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in weights and tensor.numel():
            held[key] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    loss.backward()
    return nbytes


def cost(calibration: ActivationCalibration, codecs: Mapping[str, str]) -> float:
    return cost_of(calibration, codecs, (), 0.0)


def test_what_is_foreseen_is_what_is_kept(calibrated: ActivationCalibration) -> None:
    model, run = build()
    assert calibrated.saved_nbytes({})[0] == really_kept(model, run)
    least, full = least_nbytes(calibrated), calibrated.saved_nbytes({})[0]
    for share in (0.0, 0.2, 0.5, 0.8):
        budget = int(least + share * (full - least))
        plan = plan_activations(model, run, MemoryBudget(budget, scope="activations"), CODECS)
        handle = quantize_activations(model, plan.policy)
        kept = really_kept(model, run)
        handle.remove()
        assert kept <= budget


def test_allocations_meet_budgets_and_get_better_with_them(
    calibrated: ActivationCalibration,
) -> None:
    full = calibrated.saved_nbytes({})[0]
    for recompute in (False, True):
        least = least_nbytes(calibrated, recompute=recompute)
        assert allocate(calibrated, least - 1, recompute=recompute) is None
        costs = []
        for step in range(13):
            budget = least + (full - least) * step // 12
            found = allocate(calibrated, budget, time_weight=0.0, recompute=recompute)
            assert found is not None
            kept, transient = calibrated.saved_nbytes(found.codecs, found.recomputed)
            assert (kept, transient) == (found.kept_nbytes, found.transient_nbytes)
            assert found.nbytes == kept + transient <= budget
            assert recompute or not found.recomputed
            costs.append(found.mean_squared_error)
        assert costs == sorted(costs, reverse=True)
        assert costs[0] > 0.0
        assert costs[-1] == 0.0


def test_no_uniform_choice_is_better_at_the_same_bytes(calibrated: ActivationCalibration) -> None:
    sites = [site.name for site in calibrated.sites if site.codecs]
    for codec in CODECS:
        uniform = dict.fromkeys(sites, codec)
        nbytes = calibrated.saved_nbytes(uniform)[0]
        found = allocate(calibrated, nbytes, time_weight=0.0, recompute=False)
        assert found is not None
        assert found.mean_squared_error <= cost(calibrated, uniform)
    four, five = (calibrated.saved_nbytes(dict.fromkeys(sites, c))[0] for c in ("int4", "int5"))
    between = (four + five) // 2
    found = allocate(calibrated, between, time_weight=0.0, recompute=False)
    assert found is not None
    assert found.mean_squared_error < 0.9 * cost(calibrated, dict.fromkeys(sites, "int4"))


def site(name: str, kept: int, **codecs: tuple[int, float, float]) -> SiteCalibration:
    measured = tuple(
        CodecMeasurement(codec=codec, nbytes=nbytes, time_s=time, errors={"input": error})
        for codec, (nbytes, error, time) in codecs.items()
    )
    return SiteCalibration(
        name=name, kind="norm", rows=1, numel=kept, kept_nbytes=kept, codecs=measured
    )


def blocks(count: int, seed: int, unit: int = 1) -> ActivationCalibration:
    """Random costs of blocks of two sites and two halves."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return float(torch.rand((), generator=draw)) * (high - low) + low

    sites, units, tensors = [], [], [KeptTensors(nbytes=100, savers=(Saver("", ()),))]
    for index in range(count):
        block = f"b{index}"
        units.append(UnitCalibration(name=block, time_s=uniform(1.0, 2.0)))
        for half in ("x", "y"):
            name = f"{block}.{half}"
            nbytes = unit * int(uniform(400, 2000))
            four, eight = uniform(0.05, 0.2), uniform(0.002, 0.02)
            codecs = {
                "int4": (nbytes // 4, four, uniform(-0.02, 0.2)),
                "int8": (nbytes // 2, eight, uniform(-0.02, 0.2)),
            }
            sites.append(site(f"{name}.s", nbytes, **codecs))
            units.append(UnitCalibration(name=name, time_s=uniform(0.2, 1.0)))
            inside = Saver(f"{name}.s", (block, name))
            tensors.append(KeptTensors(nbytes=nbytes, savers=(inside,)))
            tensors.append(KeptTensors(nbytes=90, savers=(Saver("", (block,), name),)))
        tensors.append(KeptTensors(nbytes=110, savers=(Saver("", (), block),)))
    return ActivationCalibration(
        sites=tuple(sites), units=tuple(units), tensors=tuple(tensors), step_time_s=10.0 * count
    )


def every_choice(calibration: ActivationCalibration, count: int) -> list[tuple[dict, tuple]]:
    """All choices for ``blocks(count, ...)``."""
    choices: list[tuple[dict, tuple]] = [({}, ())]
    for index in range(count):
        half = [
            [
                ({}, ()),
                ({f"b{index}.{h}.s": "int4"}, ()),
                ({f"b{index}.{h}.s": "int8"}, ()),
                ({}, (f"b{index}.{h}",)),
            ]
            for h in ("x", "y")
        ]
        ways = [({**a, **b}, (*c, *d)) for a, c in half[0] for b, d in half[1]]
        ways.append(({}, (f"b{index}",)))
        choices = [({**a, **b}, (*c, *d)) for a, c in choices for b, d in ways]
    return choices


@pytest.mark.parametrize("time_weight", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_choices_are_nearly_the_best_there_are(seed: int, time_weight: float) -> None:
    calibration = blocks(2, seed)
    choices = every_choice(calibration, 2)
    sizes = [sum(calibration.saved_nbytes(*choice)) for choice in choices]
    costs = [cost_of(calibration, *choice, time_weight) for choice in choices]
    full = calibration.saved_nbytes({})[0]
    assert least_nbytes(calibration) == min(sizes)
    for step in range(8):
        budget = min(sizes) + (full - min(sizes)) * step // 8
        best = min(c for c, size in zip(costs, sizes, strict=True) if size <= budget)
        found = allocate(calibration, budget, time_weight=time_weight)
        assert found is not None
        cost = cost_of(calibration, found.codecs, found.recomputed, time_weight)
        assert cost <= best * 1.02 + 1e-12
        assert allocate(calibration, budget, time_weight=time_weight) == found


def test_rounding_of_bytes_costs_a_thousandth_of_the_budget() -> None:
    calibration = blocks(2, 1, unit=1001)
    choices = every_choice(calibration, 2)
    sizes = [sum(calibration.saved_nbytes(*choice)) for choice in choices]
    costs = [cost_of(calibration, *choice, 0.1) for choice in choices]
    for index in range(0, len(choices), 7):  # budgets that a choice fills to the last byte
        less = sizes[index] * 0.999
        if less < min(sizes):
            continue
        best = min(c for c, size in zip(costs, sizes, strict=True) if size <= less)
        found = allocate(calibration, sizes[index])
        assert found is not None
        assert found.nbytes <= sizes[index]
        assert cost_of(calibration, found.codecs, found.recomputed, 0.1) <= best + 1e-12


def test_faster_codes_are_no_reason_to_lose_precision() -> None:
    codecs = {"int4": (10, 0.1, -5.0)}
    kept = KeptTensors(nbytes=100, savers=(Saver("a", ()),))
    calibration = ActivationCalibration(
        sites=(site("a", 100, **codecs),), units=(), tensors=(kept,), step_time_s=1.0
    )
    assert allocate(calibration, 100).codecs == {}
    assert allocate(calibration, 99).codecs == {"a": "int4"}
    assert allocate(calibration, 99).time_s == 0.0


def test_codes_inside_of_recomputed_modules_do_not_count() -> None:
    calibration = blocks(2, 0)
    for inside in ("b0", "b0.x"):
        coded = calibration.saved_nbytes({"b0.x.s": "int4"}, (inside,))
        assert coded == calibration.saved_nbytes({}, (inside,))


def test_time_decides_between_codes_and_recomputation() -> None:
    calibration = blocks(4, 0)
    budget = calibration.saved_nbytes({})[0] * 3 // 4
    exact = allocate(calibration, budget, time_weight=0.0)
    fast = allocate(calibration, budget, time_weight=10.0)
    assert exact is not None
    assert fast is not None
    assert exact.recomputed
    assert exact.mean_squared_error == 0.0
    assert not fast.recomputed
    assert fast.time_s < exact.time_s


def test_memory_at_the_loss_counts_instead_of_recomputation() -> None:
    calibration = blocks(2, 0)
    full = calibration.saved_nbytes({})[0]
    assert allocate(calibration, full, at_loss_nbytes=0).codecs == {}
    found = allocate(calibration, full, at_loss_nbytes=500)
    assert found is not None
    assert found.kept_nbytes + max(found.transient_nbytes, 500) <= full
    least = least_nbytes(calibration, at_loss_nbytes=5000)
    assert allocate(calibration, least, at_loss_nbytes=5000) is not None
    assert allocate(calibration, least - 1, at_loss_nbytes=5000) is None


def test_a_device_budget_leaves_room_for_weights_gradients_and_states() -> None:
    model, run = build(2)
    optimizer = torch.optim.AdamW(model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    full = calibrate_activations(model, run, ("int4",)).saved_nbytes({})[0]
    budget = numel * 16 + full // 2

    def plan(nbytes: int) -> ActivationPlan:
        return plan_activations(model, run, MemoryBudget(nbytes), CODECS, optimizers=[optimizer])

    first = plan(budget)
    assert numel * 16 <= first.other.nbytes < numel * 16 + 200  # steps and the buffer
    assert first.policy.rules
    run().backward()
    optimizer.step()
    assert plan(budget).other.nbytes == pytest.approx(first.other.nbytes, abs=200)
    with pytest.raises(RuntimeError, match="the least that would do is ([0-9]+) bytes") as error:
        plan(numel * 16)
    least = int(str(error.value).split("would do is ")[1].split()[0])
    assert plan(least).measured_nbytes + first.other.nbytes <= least
    with pytest.raises(RuntimeError, match="least that would do"):
        plan(least - 1)


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("60GiB", 60 << 30),
        ("60 GB", 60 * 10**9),
        ("1.5MiB", 3 << 19),
        ("100b", 100),
        (12345, 12345),
        (0.5, 1 << 39),
    ],
)
def test_amounts_of_memory(size: str | int | float, nbytes: int) -> None:
    assert MemoryBudget(size).nbytes(1 << 40) == nbytes


@pytest.mark.parametrize("size", ["60", "GiB", "-1GB", 0, -5, 1.5, 0.0, True, "0GB", None])
def test_amounts_that_are_none(size: object) -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        MemoryBudget(size)  # type: ignore[arg-type]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="scope='gpu'"):
        MemoryBudget("1GB", scope="gpu")  # type: ignore[arg-type]
    for wrong in (-1, "much"):
        with pytest.raises(ValueError, match=f"time_weight={wrong!r}"):
            MemoryBudget("1GB", time_weight=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recompute='no'"):
        MemoryBudget("1GB", recompute="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="share of a device's memory"):
        plan_activations(*build(2), MemoryBudget(0.5), CODECS)
