"""Kernels of ``lq_lightning``: one sub-package per operation.

The code lives in the top-level ``kernels/`` folder of the repository (``kernels/<op>/``). A wheel
maps each of those folders to ``lq_lightning.kernels.<op>``. In a source checkout this module
appends the folder to its own search path instead, so that both import the same way and no
top-level package named ``kernels`` ever exists (another project owns that import name).
"""

from pathlib import Path

_checkout_folder = Path(__file__).resolve().parents[2] / "kernels"
if (_checkout_folder / "message" / "__init__.py").is_file():
    __path__.append(str(_checkout_folder))
