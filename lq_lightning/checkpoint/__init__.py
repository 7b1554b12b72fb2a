"""Checkpoints of sharded and quantized runs: written, read and turned into one file."""
