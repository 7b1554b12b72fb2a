"""``Trainer(callbacks=[StageBitCompensation(), ActivationQuantization()])``: bits by stage."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lq_lightning.pipeline.schedules import SPLIT_SCHEDULES, compensated_bits, in_flight

from .activation_quantization import ActivationQuantization

_MEASURED_AFTER = 3  # batches: the first ones allocate, compile and tune
_GIB = 2**30


class StageBitCompensation(Callback):
    """Gives saved activations more bits on pipeline ranks that keep fewer micro-batches.

    The first ranks of a pipeline keep the most micro-batches between their forward and backward
    passes. They are counted from the schedule, and each rank's integer codes of
    ``ActivationQuantization`` get ``bits * N_1 / N_i`` bits: codes of ``bits`` bits or fewer; wider
    ones keep their width if it is larger. Transforms and groups stay as they are.
    (DBCA-PP; AGoQ, section 4.2.)

    Schedules that split backward passes (``"zero_bubble"``, ``"zbv"``) are refused: between the
    two halves a micro-batch keeps more than before, so that counts say nothing of memory.

    Args:
        bits: Bits of the rank that keeps the most; 5, as in the recipes, where the paper has 4.
        rounding: ``"floor"``, with which no rank's peak grows, or ``"nearest"``, as in the paper.
        cap: Most bits.

    Attributes:
        counts: Most micro-batches that each rank of the pipeline keeps; empty before ``fit``.
        stage_bits: Bits of each rank of the pipeline; empty before ``fit``.

    Raises:
        ValueError: A value that is not listed above; or, before training starts: the strategy has
            no pipeline, or a schedule that splits backward passes, the Trainer has no
            ``ActivationQuantization``, or that has a budget or codes that are no integers.
    """

    def __init__(
        self,
        bits: int = 5,
        rounding: Literal["floor", "nearest"] = "floor",
        cap: int = 8,
    ) -> None:
        super().__init__()
        compensated_bits((1,), bits, rounding, cap)  # checks the options
        self._options = (bits, rounding, cap)
        self.counts: tuple[int, ...] = ()
        self.stage_bits: tuple[int, ...] = ()
        self._steps = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Count, and tell ``ActivationQuantization`` before it quantizes the model."""
        if stage != "fit":
            return
        name = type(self).__name__
        facts: Any = getattr(trainer.strategy, "pipeline", None)
        if not hasattr(facts, "schedule"):
            raise ValueError(
                f"`{name}` needs a pipeline, which `{type(trainer.strategy).__name__}` does not "
                'have: use strategy="quantized_pipeline" with more than one rank along the '
                "pipeline, or remove the callback."
            )
        if facts.schedule in SPLIT_SCHEDULES:
            raise ValueError(
                f"`{name}` does not work with `schedule={facts.schedule!r}`, in which the last "
                "ranks keep the most, between the halves of backward passes: remove the callback, "
                "or use `schedule='1f1b'`, which needs less memory with coded activations."
            )
        self.counts = in_flight(
            facts.schedule, facts.pipeline_size, facts.num_microbatches, facts.stages_per_rank
        )
        self._steps = 0
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        quantization = next((c for c in callbacks if isinstance(c, ActivationQuantization)), None)
        if quantization is None:
            raise ValueError(
                f"`{name}` says in how many bits `ActivationQuantization` keeps activations, but "
                "there is none in the Trainer: add it to the callbacks."
            )
        self.stage_bits = compensated_bits(self.counts, *self._options)
        quantization.compensate(self._options[0], self.stage_bits[facts.rank])
        rank_zero_info(f"{name}: {facts.schedule}\n{self.summary()}")

    def summary(self) -> str:
        """Return a table of ranks, micro-batches kept, bits, and their product, the peak."""
        ranks = list(zip(self.counts, self.stage_bits, strict=True))
        peaks = [bits * count for count, bits in ranks]
        lines = ["rank  micro-batches kept  bits  predicted peak"]
        for rank, ((count, bits), peak) in enumerate(zip(ranks, peaks, strict=True)):
            part = f"{peak} ({peak / max(peaks):.0%})"
            lines.append(f"{rank:>4}  {count:>18}  {bits:>4}  {part:>14}")
        return "\n".join(lines)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        self._steps += 1
        if self._steps == _MEASURED_AFTER and trainer.strategy.root_device.type == "cuda":
            self._say_peaks(pl_module, trainer.strategy.pipeline.rank)  # type: ignore[attr-defined]

    def _say_peaks(self, pl_module: pl.LightningModule, rank: int) -> None:
        peak = torch.tensor(
            [float(rank), torch.cuda.max_memory_allocated() / _GIB], device=pl_module.device
        )
        peaks: dict[int, float] = {}
        for each, size in pl_module.all_gather(peak).view(-1, 2).tolist():  # type: ignore[union-attr]
            peaks[int(each)] = max(size, peaks.get(int(each), 0.0))
        measured = ", ".join(f"{peaks[each]:.2f}" for each in sorted(peaks))
        rank_zero_info(
            f"{type(self).__name__}: measured peak of all memory by rank, GiB: {measured}"
        )
