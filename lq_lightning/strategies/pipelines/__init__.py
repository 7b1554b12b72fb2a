"""Parts of ``quantized_pipeline``: stages, batches, logging and checkpoints."""
