"""Feedback: encode with what earlier messages left out, and keep what this one does; one pass."""

from .op import feedback_out

__all__ = ["feedback_out"]
