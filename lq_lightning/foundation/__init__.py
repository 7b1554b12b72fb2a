"""What several of the sibling packages need: one floor below all of them.

Nothing here knows of codecs, kernels or Lightning.
"""
