"""Helpers shared by the tests. `tests/_harness` is on `sys.path` through pytest's `pythonpath`.

Child processes inherit `sys.path`, so functions that run on the ranks can import this package too.
"""

from lq_testing.poison import poison_uninitialized_memory
from lq_testing.ranks import SHARED_GPUS, RankError, free_port, run_ranks

__all__ = ["SHARED_GPUS", "RankError", "free_port", "poison_uninitialized_memory", "run_ranks"]
