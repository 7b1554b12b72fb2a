"""Which folders are packages; everything else is in pyproject.toml.

Kernel sources live in the checkout's top-level ``kernels/<op>/`` and install as
``lq_lightning.kernels.<op>``, which setuptools' own discovery cannot say. There is deliberately no
``kernels/__init__.py``, because transformers imports whatever answers to ``import kernels``.
"""

from setuptools import find_packages, setup

kernels = find_packages("kernels")
setup(
    packages=[
        *find_packages(include=["lq_lightning", "lq_lightning.*"]),
        *(f"lq_lightning.kernels.{name}" for name in kernels),
    ],
    package_dir={
        "lq_lightning": "lq_lightning",
        **{f"lq_lightning.kernels.{name}": f"kernels/{name.replace('.', '/')}" for name in kernels},
    },
)
