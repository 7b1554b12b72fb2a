"""The version of this package, for people, programs and the build."""

__version__ = "0.1.0"
