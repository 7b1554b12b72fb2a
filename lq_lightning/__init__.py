"""Train with fewer bits on the wire and in memory, through stock PyTorch Lightning.

Importing this package registers ``Trainer(strategy="quantized_fsdp")`` and
``Trainer(strategy="quantized_pipeline")``. It works with
``lightning.pytorch``, not with the separate package ``pytorch_lightning``.
"""

from lq_lightning._compat.requirements import unmet_requirements

# Before what only other versions have is imported.
if (_unmet := unmet_requirements()) is not None:
    raise ImportError(_unmet)

from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lq_lightning.__about__ import __version__
from lq_lightning._compat.lightning import check_trainer_options
from lq_lightning.activations import (
    ActivationPlan,
    ActivationPolicy,
    ActivationRule,
    MemoryBudget,
    QuantizedActivations,
    plan_activations,
    quantize_activations,
)
from lq_lightning.callbacks import (
    ActivationQuantization,
    AdaptiveBits,
    QuantizationMonitor,
    StageBitCompensation,
)
from lq_lightning.checkpoint.pretrained import load_pretrained
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import (
    CommunicationPlan,
    GradientQuantization,
    LocalSteps,
    QuantizedAllReduce,
    QuantizedCommunication,
    QuantizedGradientBuffer,
    Topology,
    WeightQuantization,
    quantized_all_reduce_hook,
)
from lq_lightning.foundation.trainer_options import check_each, check_precision, check_strategy_name
from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedAdam,
    QuantizedAdamW,
    QuantizedLion,
    QuantizedMuon,
    QuantizedSGD,
    muon_groups,
)
from lq_lightning.pipeline.aq_sgd import AQSGDQuantization
from lq_lightning.pipeline.message import TAHQuantization
from lq_lightning.plugins import FullyShardedPrecision, QuantizedPrecision
from lq_lightning.plugins.precision import grad_norm
from lq_lightning.strategies import QuantizedFSDPStrategy, QuantizedPipelineStrategy

if TYPE_CHECKING:
    from lq_lightning.planning.plan import plan

__all__ = [
    "AQSGDQuantization",
    "ActivationPlan",
    "ActivationPolicy",
    "ActivationQuantization",
    "ActivationRule",
    "AdaptiveBits",
    "CodecSpec",
    "CommunicationPlan",
    "FullyShardedPrecision",
    "GradientQuantization",
    "LocalSteps",
    "MemoryBudget",
    "OptimizerQuantization",
    "QuantizationMonitor",
    "QuantizedActivations",
    "QuantizedAdam",
    "QuantizedAdamW",
    "QuantizedAllReduce",
    "QuantizedCommunication",
    "QuantizedFSDPStrategy",
    "QuantizedGradientBuffer",
    "QuantizedLion",
    "QuantizedMuon",
    "QuantizedPipelineStrategy",
    "QuantizedPrecision",
    "QuantizedSGD",
    "StageBitCompensation",
    "TAHQuantization",
    "Topology",
    "WeightQuantization",
    "__version__",
    "grad_norm",
    "load_pretrained",
    "muon_groups",
    "plan",
    "plan_activations",
    "quantize_activations",
    "quantized_all_reduce_hook",
]

for _strategy, _description in (
    (
        QuantizedFSDPStrategy,
        "FSDP2 with 4-bit weight differences and two-level 8/4-bit gradients (SDP4Bit)",
    ),
    (
        QuantizedPipelineStrategy,
        "Pipeline parallelism with few bits between stages (TAH-Quant), FSDP2 inside of them",
    ),
):
    if _strategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(_strategy.strategy_name, _strategy, description=_description)


def _check_connector(strategy: object, plugins: object, precision: object) -> None:
    check_strategy_name(strategy, StrategyRegistry.available_strategies())
    check_each("plugins", plugins)
    check_precision(precision, plugins)


check_trainer_options(_check_connector, partial(check_each, "callbacks"))


def __getattr__(name: str) -> Any:
    """Import ``plan`` when it is first used: it needs a simulator, which training does not."""
    if name == "plan":
        from lq_lightning.planning.plan import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
