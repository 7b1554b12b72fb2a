"""Lightning strategies."""

from lq_lightning.strategies.fully_sharded import FullyShardedStrategy
from lq_lightning.strategies.quantized_fsdp import QuantizedFSDPStrategy
from lq_lightning.strategies.quantized_pipeline import QuantizedPipelineStrategy

__all__ = ["FullyShardedStrategy", "QuantizedFSDPStrategy", "QuantizedPipelineStrategy"]
