"""``Trainer(callbacks=[StageBitCompensation(), ActivationQuantization()])``: bits by stage."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lq_lightning.pipeline.schedules import InFlight, compensated_bits, in_flight

from .activation_quantization import ActivationQuantization

__all__ = ["PipelineFacts", "StageBitCompensation"]

_MEASURED_AFTER = 3  # batches: the first ones allocate, compile and tune
_GIB = 2**30


@runtime_checkable
class PipelineFacts(Protocol):
    """What ``Trainer.strategy.pipeline`` says of the pipeline of this process.

    Attributes:
        schedule: name of the schedule.
        pipeline_size: ranks of the pipeline.
        num_microbatches: micro-batches of a training step.
        stages_per_rank: stages on each rank.
        rank: number of this process's rank in its pipeline.
        kept_nbytes: with a schedule that splits backward passes, after the first batch of a fit:
            bytes that a micro-batch keeps on this rank before its backward pass, and between the
            two halves.
    """

    schedule: str
    pipeline_size: int
    num_microbatches: int
    stages_per_rank: int
    rank: int
    kept_nbytes: tuple[int, int]


class StageBitCompensation(Callback):
    """Gives saved activations more bits on pipeline ranks that keep fewer micro-batches.

    The first ranks of a pipeline keep the most micro-batches between their forward and backward
    passes. What is counted from the schedule that runs, and each rank's integer codes of
    ``ActivationQuantization`` get ``bits * N_1 / N_i`` bits: codes of ``bits`` bits or fewer; wider
    ones stay as they are if they are wider still. Transforms and groups stay as they are.
    (DBCA-PP; AGoQ, section 4.2.)

    Schedules that split backward passes (``"zero_bubble"``, ``"zbv"``) also keep micro-batches
    between the two halves: what gradients of weights are computed from. How much that is, next to
    what a micro-batch keeps before, is measured in the first batch, in which all ranks have
    ``bits``; a resumed run goes on with what was measured.

    Args:
        bits: Of the rank that keeps the most; 5, as in the recipes, where the paper has 4.
        rounding: ``"floor"``, with which no rank's peak grows, or ``"nearest"``, as in the paper.
        cap: Most bits.
        half_size: For schedules that split backward passes: bytes that a micro-batch keeps between
            the halves, per byte that it keeps before, as the callback prints it. None measures it.

    Raises:
        ValueError: A value that is not listed above; or, before training starts: the strategy has
            no pipeline, the Trainer has no ``ActivationQuantization``, or that has a budget or
            codes that are no integers.
    """

    def __init__(
        self,
        bits: int = 5,
        rounding: Literal["floor", "nearest"] = "floor",
        cap: int = 8,
        half_size: float | None = None,
    ) -> None:
        super().__init__()
        compensated_bits((1,), bits, rounding, cap, half_size or 0.0)  # checks them
        self._options = (bits, rounding, cap)
        self._measures = half_size is None
        self._half_size = half_size
        self._counts: tuple[InFlight, ...] = ()
        self._bits: tuple[int, ...] = ()
        self._steps = 0

    @property
    def counts(self) -> tuple[InFlight, ...]:
        """What each rank of the pipeline keeps at most; empty before ``fit``."""
        return self._counts

    @property
    def half_size(self) -> float | None:
        """As given, or as measured; None before."""
        return self._half_size

    @property
    def stage_bits(self) -> tuple[int, ...]:
        """Bits of each rank of the pipeline; empty before ``fit``."""
        return self._bits

    @override
    def state_dict(self) -> dict[str, Any]:
        """What was measured."""
        return {"half_size": self._half_size} if self._measures and self._half_size else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what was measured, with the bits that the saved run began with."""
        if self._measures:
            self._half_size = state_dict["half_size"]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Count, and tell ``ActivationQuantization`` before it quantizes the model.

        Raises:
            ValueError: There is no pipeline, no ``ActivationQuantization``, or nothing that could
                have other bits.
        """
        if stage != "fit":
            return
        name = type(self).__name__
        facts = getattr(trainer.strategy, "pipeline", None)
        if not isinstance(facts, PipelineFacts):
            raise ValueError(
                f"`{name}` needs a pipeline, which `{type(trainer.strategy).__name__}` does not "
                'have: use strategy="quantized_pipeline" with more than one rank along the '
                "pipeline, or remove the callback."
            )
        self._counts = in_flight(
            facts.schedule, facts.pipeline_size, facts.num_microbatches, facts.stages_per_rank
        )
        self._steps = 0
        if self._measures:
            self._half_size = None
        self._choose(trainer, facts)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Use what a checkpoint says was measured."""
        if self._measures and self._splits and self._half_size is not None:
            self._choose(trainer, trainer.strategy.pipeline)  # type: ignore[attr-defined]

    @property
    def _splits(self) -> bool:
        return any(count.halves for count in self._counts)

    def _choose(self, trainer: pl.Trainer, facts: PipelineFacts) -> None:
        """Choose the bits of all ranks, and tell ``ActivationQuantization`` those of this one."""
        name, bits = type(self).__name__, self._options[0]
        found = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, ActivationQuantization)
        ]
        if not found:
            raise ValueError(
                f"`{name}` says in how many bits `ActivationQuantization` keeps activations, but "
                "there is none in the Trainer: add it to the callbacks."
            )
        if self._splits and self._half_size is None:
            self._bits = (bits,) * facts.pipeline_size
            said = f"{bits} bits on all ranks in the first batch, which is measured"
        else:
            self._bits = compensated_bits(self._counts, *self._options, self._half_size or 0.0)
            said = self.summary()
        found[0].compensate(bits, self._bits[facts.rank])
        rank_zero_info(f"{name}: {facts.schedule}\n{said}")

    def summary(self) -> str:
        """Return a table of ranks, micro-batches kept, bits, and their product, the peak."""
        size = self._half_size or 0.0
        products = [
            bits * count.peak(size) for bits, count in zip(self._bits, self._counts, strict=True)
        ]
        lines = ["rank  micro-batches kept  bits  predicted peak"]
        rows = zip(self._counts, self._bits, products, strict=True)
        for rank, (count, bits, product) in enumerate(rows):
            part = f"{product:.4g} ({product / max(products):.0%})"
            lines.append(f"{rank:>4}  {count!s:>18}  {bits:>4}  {part:>14}")
        if self._splits:
            lines.append(
                f"between the halves of a backward pass a micro-batch keeps {size:.3g} times what "
                f"it keeps before (half_size={size:.3g})"
            )
        return "\n".join(lines)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, idx: int
    ) -> None:
        """Measure what the first batch kept; on GPUs, say once how much memory each rank needed."""
        self._steps += 1
        facts: PipelineFacts = trainer.strategy.pipeline  # type: ignore[attr-defined]
        if self._splits and self._half_size is None:
            kept = torch.tensor(facts.kept_nbytes, dtype=torch.float64, device=pl_module.device)
            whole, half = pl_module.all_gather(kept).view(-1, 2).sum(0).tolist()  # type: ignore[union-attr]
            self._half_size = half / whole if whole else 0.0
            self._choose(trainer, facts)
        if self._steps == _MEASURED_AFTER and trainer.strategy.root_device.type == "cuda":
            self._say_peaks(pl_module, facts)

    def _say_peaks(self, pl_module: pl.LightningModule, facts: PipelineFacts) -> None:
        peak = torch.tensor(
            [float(facts.rank), torch.cuda.max_memory_allocated() / _GIB], device=pl_module.device
        )
        peaks: dict[int, float] = {}
        for rank, size in pl_module.all_gather(peak).view(-1, 2).tolist():  # type: ignore[union-attr]
            peaks[int(rank)] = max(size, peaks.get(int(rank), 0.0))
        measured = ", ".join(f"{peaks[rank]:.2f}" for rank in sorted(peaks))
        rank_zero_info(
            f"{type(self).__name__}: measured peak of all memory by rank, GiB: {measured}"
        )
