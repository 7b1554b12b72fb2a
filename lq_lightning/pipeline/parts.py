"""What a stage of a pipeline runs: its part of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .calls import BoundaryMeta
from .partition import kept_stages
from .placeholders import Placeholders

__all__ = ["StageModule"]


def _call(part: Callable[[Tensor | None], Any], hidden: Tensor | None) -> Any:
    return part(hidden)


class StageModule(nn.Module):
    """One stage: runs the part of a step that has its layers. See [Note: a step in parts].

    It has no modules of its own, so that ``state_dict`` and modes stay with ``module``. Its
    ``parameters()`` are those of the stage, read from ``module`` anew each time, since FSDP2 puts
    others there while it runs; ``named_parameters()`` gives the names in the whole model.

    Order: :func:`keep_stages`, then weights and ``fully_shard`` on the layers and ``module``, then
    this. Several stages of a rank share one ``module``; one of them runs at a time.

    Args:
        module: A model of which :func:`keep_stages` kept this stage.
        stage: Index of the stage.
        run: Runs the user's step on the micro-batch of that index and returns its loss or output.
        enter: Called as ``enter(part, hidden)``, must return ``part(hidden)``. For what has to be
            around a part while no exception may cross it: pass a method of ``module`` that
            ``register_fsdp_forward_method`` made a forward, so that the root of FSDP2 sees the
            received hidden state as its input, and as its output what goes on to the next stage.

    Attributes:
        index: Micro-batch of the next call; set it before.
        stage: Index of the stage.
        watched: Whether the next part refuses what the step uses of modules that earlier stages
            hold, see [Note: what depends on stand-ins]. None: the first part does, later ones not.
        refused: Where messages about that go; None: they are raised.

    Raises:
        ValueError: the stage is not one of those that were kept.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        run: Callable[[int], Any],
        enter: Callable[[Callable[[Tensor | None], Any], Tensor | None], Any] = _call,
    ) -> None:
        super().__init__()
        record = kept_stages(module)
        if record is None or stage not in record.stages:
            held = "the whole module" if record is None else f"the stages {list(record.stages)}"
            raise ValueError(f"stage {stage} was not kept: this rank holds {held}.")
        self.index = 0
        self.stage = stage
        self._plan, self._calls = record.plan, record.calls
        self._module = [module]  # not a submodule
        self._run, self._enter = run, enter
        first = self._plan.layers.index(self._plan.stages[stage][0])
        self._span = (first, first + len(self._plan.stages[stage]) - 1)
        self.watched: bool | None = None
        self.refused: list[str] | None = None
        names = (name for name, _ in module.named_parameters(remove_duplicate=False))
        self._names = frozenset(name for name in names if stage in self._plan.stages_of(name))

    @property
    def is_first(self) -> bool:
        """Whether it gets no hidden state."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with what the step returns."""
        return self.stage == self._plan.num_stages - 1

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of the stage with their names in the whole model."""
        dot = f"{prefix}." if prefix else ""
        seen = set[Parameter]()
        # With all names: the first one of a shared parameter may be that of another stage.
        for name, parameter in self._module[0].named_parameters(remove_duplicate=False):
            if name in self._names and parameter not in seen:
                if remove_duplicate:
                    seen.add(parameter)
                yield f"{dot}{name}", parameter

    def set_boundary(self, boundary: BoundaryMeta) -> None:
        """Say what crosses the boundaries from now on; on all stages, before they run."""
        self._calls.boundary = boundary

    def forward(self, hidden: Tensor | None = None) -> Any:
        """Run the part on the micro-batch ``index``.

        Args:
            hidden: Of the stage before; None on the first stage.

        Returns:
            The hidden state for the next stage, on the last what the step returns.

        Raises:
            RuntimeError: the step calls the layers not at all, twice, or in another order, or the
                shape of ``hidden`` is not that of the micro-batch.
            NotImplementedError: the step uses more of earlier stages than the hidden state.
        """
        return self._enter(self._part, hidden)

    def _part(self, hidden: Tensor | None) -> Any:
        if self.watched is None:
            watched, self.watched = True, False
        else:
            watched = self.watched
        placeholders = Placeholders(self._module[0]) if watched and not self.is_first else None
        step = partial(self._run, self.index)
        result = self._calls.run(step, self._span, hidden, placeholders)
        if placeholders is not None and placeholders.refused:
            if self.refused is None:
                raise NotImplementedError(placeholders.refused[0])
            self.refused += placeholders.refused
        return result

    def probe(self, index: int) -> BoundaryMeta:
        """Find what crosses the boundaries for the micro-batch ``index``, on the first stage.

        Runs the step up to and through the first layer without gradients; random numbers and
        buffers, such as running statistics, stay as they were. With FSDP2 it is a forward of the
        root: all ranks of its mesh must probe.

        Raises:
            RuntimeError: this is not the first stage.
            NotImplementedError: the layers return more than one hidden state.
        """
        if not self.is_first:
            raise RuntimeError(
                f"stage {self.stage} cannot probe: only the first stage has its input."
            )

        def part(hidden: Tensor | None) -> Any:
            return self._calls.probe(partial(self._run, index))

        numbers = self._calls.random.batch(0, advance=False)
        with torch.no_grad(), numbers, _unchanged_buffers(self._module[0]):
            boundary: BoundaryMeta = self._enter(part, None)
        return boundary


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Undo what is done to buffers inside, in place or by putting other tensors there."""
    saved = [
        (owner, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in saved:
            buffer.copy_(value)
            setattr(owner, name, buffer)
