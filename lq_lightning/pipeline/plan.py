"""Plan of a pipeline: the modules of a model that each stage holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from torch import nn

from lq_lightning._compat.modules import is_compiled_in_place, is_compiled_wrapper
from lq_lightning.foundation.checks import counted, is_whole
from lq_lightning.foundation.layer_stack import LayerStack, find_layer_stack, names_around

from .interceptor import COLLECTING, LayerInterceptor, placeholders


def balance(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return how many consecutive layers each stage gets, one or more.

    Minimizes the largest cost of a stage; among such cuts, the sum of the squared costs. Where that
    leaves a choice, earlier stages get fewer layers, since they keep the activations of more
    micro-batches. ``costs`` are those of the layers, ``first`` and ``last`` further costs of the
    first and the last stage, none of them negative.
    """
    sums = list(accumulate(costs, initial=0.0))

    def cost_of(stage: int, begin: int, end: int) -> float:
        own = sums[end] - sums[begin]
        return own + first * (stage == 0) + last * (stage == num_stages - 1)

    limit = _search(len(costs), num_stages, cost_of, None)[0]
    return _search(len(costs), num_stages, cost_of, limit)[1]


def _search(
    num_layers: int, num_stages: int, cost_of: Callable[[int, int, int], float], limit: float | None
) -> tuple[float, tuple[int, ...]]:
    """Find the cut of the smallest maximum, or within a limit of the smallest sum of squares."""
    # best[end]: value and cut of the stages so far, which hold the first `end` layers
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        later = num_stages - 1 - stage
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_layers - later + 1):
            for begin, (value, cut) in best.items():
                if begin >= end:
                    continue
                cost = cost_of(stage, begin, end)
                if limit is not None and cost > limit:
                    continue
                total = max(value, cost) if limit is None else value + cost * cost
                if end in reached and total > reached[end][0]:
                    continue
                candidate = (total, (*cut, end - begin))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[num_layers]


Split = Literal["parameters"] | Sequence[int] | Mapping[str, float]
"""Division into stages: by parameters, layers per stage, or costs of modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedParameter:
    """A parameter that several stages hold, which must add up its gradients."""

    names: tuple[str, ...]  # in the whole model, beginning with that in ``named_parameters()``
    stages: tuple[int, ...]  # ascending, two or more


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """Modules of each stage, by their names in the whole model."""

    num_stages: int
    layers: tuple[str, ...]  # repeated blocks, in the order of their calls
    stages: tuple[tuple[str, ...], ...]  # layers of each stage
    before: tuple[str, ...]  # other modules with parameters on the first stage (embeddings)
    after: tuple[str, ...]  # other modules with parameters on the last stage (last norm, head)
    aliases: Mapping[str, str]  # further names of modules that have several -> the first
    shared: tuple[SharedParameter, ...]  # that several stages hold
    costs: tuple[float, ...]  # share of each stage in the cost by which stages were balanced

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold the parameter, buffer or module of this name, ascending.

        A tied parameter has several names, each in its own stage: see ``shared``. Anything that is
        neither in a layer nor in another module with parameters is on every stage.
        """
        for stage in range(self.num_stages):
            if _is_inside(name, self.modules_of(stage)):
                return (stage,)
        for alias, first in self.aliases.items():
            if _is_inside(name, (alias,)):
                return self.stages_of(first + name.removeprefix(alias))
        return tuple(range(self.num_stages))

    def modules_of(self, stage: int) -> tuple[str, ...]:
        """Return the modules with parameters of one stage, in the order of calls."""
        return self._with_ends(stage, *self.stages[stage])

    def _with_ends(self, stage: int, *names: str) -> tuple[str, ...]:
        before = self.before if stage == 0 else ()
        after = self.after if stage == self.num_stages - 1 else ()
        return (*before, *names, *after)

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [f"{counted(len(self.layers), 'layer')} in {counted(self.num_stages, 'stage')}:"]
        for stage, cost in enumerate(self.costs):
            names = self.stages[stage]
            span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            parts = self._with_ends(stage, f"{span} ({len(names)})")
            lines.append(f"  {stage}: {', '.join(parts)}: {cost:.0%}")
        for shared in self.shared:
            stages = ", ".join(map(str, shared.stages))
            lines.append(
                f"`{shared.names[0]}` is on the stages {stages}, which add up its gradients"
                + (f"; also called {', '.join(shared.names[1:])}" if shared.names[1:] else "")
            )
        return "\n".join(lines)


def plan_stages(
    module: nn.Module,
    num_stages: int,
    split: Split = "parameters",
    *,
    trunk: str | None = None,
) -> PipelinePlan:
    """Cut a model into the stages of a pipeline; the model is left as it is.

    The repeated blocks are cut into consecutive groups. Modules that run before them are on the
    first stage, modules that run after them on the last. A parameter that a module around the
    blocks holds itself (as ``self.positions = nn.Parameter(...)``) is on every stage.

    Args:
        module: The whole model, on any device (also meta).
        num_stages: Stages over all ranks: pipeline size times stages per rank.
        split: ``"parameters"`` minimizes the largest number of parameters of a stage; a list gives
            the layers of each stage; a mapping from names of layers and other modules to costs (as
            from :func:`measure_times`) replaces the numbers of parameters.
        trunk: Name of the container of the blocks, for a model with several lists of them.

    Raises:
        ValueError: no blocks, fewer layers than stages, a stage without layers, a bad ``split``.
        NotImplementedError: a model that cannot be cut: encoder-decoder, several lists of blocks,
            a layer that occurs twice, whole-model compilation, a module before the layers that no
            placeholder can replace.
    """
    found = find_layer_stack(module, trunk)
    if len(found.layers) < num_stages:
        raise ValueError(
            f"`{type(module).__name__}` has {counted(len(found.layers), 'layer')}, fewer than the "
            f"{counted(num_stages, 'stage')} of the pipeline. Use a smaller `pipeline_size` or "
            "`stages_per_rank`, or a deeper model."
        )
    counts, costs = _counts(module, found, num_stages, split)
    ends = [0, *accumulate(counts)]
    stages = tuple(found.layers[begin:end] for begin, end in pairwise(ends))
    plan = PipelinePlan(
        num_stages=num_stages,
        layers=found.layers,
        stages=stages,
        before=found.before,
        after=found.after,
        aliases=_aliases(module),
        shared=(),
        costs=(),
    )
    if num_stages > 1:
        _check(module, plan)
    per_stage = [sum(costs[name] for name in plan.modules_of(s)) for s in range(num_stages)]
    total = sum(per_stage) or 1.0
    return replace(
        plan,
        shared=tuple(_shared(module, plan)),
        costs=tuple(cost / total for cost in per_stage),
    )


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


# --- how many layers each stage gets ----------------------------------------------------------


def _counts(
    module: nn.Module, trunk: LayerStack, num_stages: int, split: Split
) -> tuple[tuple[int, ...], dict[str, float]]:
    """Return the number of layers of each stage, and the cost of every module."""
    names = (*trunk.before, *trunk.layers, *trunk.after)
    if isinstance(split, Mapping):
        costs = _given_costs(split, trunk, names)
    else:
        # An embedding that is also the head counts where it is used: both stages hold it.
        sizes = {name: module.get_submodule(name).parameters() for name in names}
        costs = {name: float(sum(p.numel() for p in ps)) for name, ps in sizes.items()}
    if not isinstance(split, (str, Mapping)):
        return _given_counts(split, trunk, num_stages), costs
    counts = balance(
        [costs[name] for name in trunk.layers],
        num_stages,
        first=sum(costs[name] for name in trunk.before),
        last=sum(costs[name] for name in trunk.after),
    )
    return counts, costs


def _given_counts(split: Sequence[int], trunk: LayerStack, num_stages: int) -> tuple[int, ...]:
    counts = tuple(split)
    if not all(map(is_whole, counts)):
        raise ValueError(f"`split={list(counts)}` must hold whole numbers of layers.")
    for stage, count in enumerate(counts):
        if count < 1:
            raise ValueError(
                f"`split={list(counts)}` leaves stage {stage} without layers: every stage needs "
                "one or more."
            )
    if len(counts) != num_stages or sum(counts) != len(trunk.layers):
        raise ValueError(
            f"`split={list(counts)}` gives {counted(sum(counts), 'layer')} to "
            f"{counted(len(counts), 'stage')}, but the pipeline has "
            f"{counted(num_stages, 'stage')} and the model "
            f"{counted(len(trunk.layers), 'layer')}. Give one number for each stage, "
            f"{len(trunk.layers)} in all."
        )
    return counts


def _given_costs(
    split: Mapping[str, float], trunk: LayerStack, names: tuple[str, ...]
) -> dict[str, float]:
    unknown = [name for name in split if name not in names]
    missing = [name for name in trunk.layers if name not in split]
    if unknown or missing:
        others = ", ".join((*trunk.before, *trunk.after)) or "nothing else"
        wrong = f"has no module {unknown[:3]}" if unknown else f"needs costs of {missing[:3]}"
        raise ValueError(
            f"`split`: the model {wrong}. Give a cost to every layer ({trunk.layers[0]}, ...), "
            f"and, where they matter, to {others}."
        )
    bad = {name: cost for name, cost in split.items() if not 0 <= cost < float("inf")}
    if bad:
        raise ValueError(f"`split={bad}`: costs must be finite and not negative.")
    return {name: float(split.get(name, 0.0)) for name in names}


# --- what can be cut --------------------------------------------------------------------------


def _check(module: nn.Module, plan: PipelinePlan) -> None:
    for name in plan.before:  # raises where a module has no placeholder
        placeholders(module.get_submodule(name), name, LayerInterceptor(()))
    for name in names_around(plan.layers[0]):
        outer = module.get_submodule(name)
        if is_compiled_in_place(outer) or is_compiled_wrapper(outer):
            raise NotImplementedError(
                f"`{name or type(module).__name__}` is compiled as a whole, so that it cannot be "
                "left after the layers of a stage. Compile each layer instead "
                "(`layer.compile()`, or the strategy's `compile_units`)."
            )
        config = getattr(outer, "config", None)
        for flag in COLLECTING:
            if getattr(config, flag, False) is True:
                raise NotImplementedError(
                    f"`config.{flag}=True` of `{name or type(module).__name__}` collects something "
                    "from every layer, but a stage has only its own: set it to False, or use "
                    "`quantized_fsdp`."
                )
    for name in plan.layers:
        if is_compiled_wrapper(module.get_submodule(name)):
            raise NotImplementedError(
                f"`{name}` is wrapped by `torch.compile(layer)`, which changes its name: call "
                "`layer.compile()` instead, or use the strategy's `compile_units`."
            )


def _aliases(module: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    names = ((name, id(part)) for name, part in module.named_modules(remove_duplicate=False))
    return {name: first[part] for name, part in names if first.setdefault(part, name) != name}


def _shared(module: nn.Module, plan: PipelinePlan) -> Iterator[SharedParameter]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for group in names.values():
        stages = sorted({stage for name in group for stage in plan.stages_of(name)})
        if len(stages) > 1:
            yield SharedParameter(names=tuple(group), stages=tuple(stages))


def hidden_size(module: nn.Module, plan: PipelinePlan) -> int | None:
    """Return the channels of hidden states between layers, where the whole module shows them.

    It does where nothing in front of the layers but embeddings has matrices, all of one width, of
    which the first part of each layer is too. ``None``: only a forward can tell.
    """
    before = [child for name in plan.before for child in module.get_submodule(name).modules()]
    widths = {child.embedding_dim for child in before if isinstance(child, nn.Embedding)}
    matrices = (p for child in before for p in child.parameters(recurse=False) if p.dim() > 1)
    tables = {id(child.weight) for child in before if isinstance(child, nn.Embedding)}
    if len(widths) != 1 or any(id(matrix) not in tables for matrix in matrices):
        return None
    (width,) = widths
    firsts = {_first_width(module.get_submodule(name)) for name in plan.layers}
    return width if firsts == {width} else None


def _first_width(layer: nn.Module) -> int | None:
    """The input size of a layer's first norm, linear layer or attention."""
    firsts = (next(child.parameters(recurse=False), None) for child in layer.modules())
    first = next((weight for weight in firsts if weight is not None), None)
    return first.shape[-1] if first is not None and first.dim() in (1, 2) else None
