"""Code that sibling packages share; it knows nothing of codecs, kernels or Lightning."""
