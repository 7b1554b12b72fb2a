"""Lightning plugins."""

from lq_lightning.plugins.precision import FullyShardedPrecision

__all__ = ["FullyShardedPrecision"]
