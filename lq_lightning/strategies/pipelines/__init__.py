"""Parts of ``quantized_pipeline``: what it holds, runs, logs and saves of a module in stages."""
