"""Lightning strategies, and the pieces to build your own."""

from lq_lightning.foundation.strategy_part import StrategyPart
from lq_lightning.strategies.fully_sharded import FullyShardedStrategy
from lq_lightning.strategies.options import FSDPOptions
from lq_lightning.strategies.quantized_fsdp import QuantizedFSDPStrategy
from lq_lightning.strategies.quantized_pipeline import QuantizedPipelineStrategy

__all__ = [
    "FSDPOptions",
    "FullyShardedStrategy",
    "QuantizedFSDPStrategy",
    "QuantizedPipelineStrategy",
    "StrategyPart",
]
