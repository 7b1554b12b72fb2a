"""Machines that one can rent: what their GPUs and links really reach, and how sure that is."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lq_lightning.foundation.checks import check_count, is_number
from lq_lightning.foundation.nested import from_plain

PROFILE_FORMAT = "lq-lightning doctor 1"
_GIB, _TERA, _GIGA = 2**30, 1e12, 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A connection, in one direction; both directions carry this at once.

    Bytes are the payload of large messages, the latency that of a message without bytes; ``error``
    is the relative standard error of both.
    """

    bytes_per_s: float
    latency_s: float
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU with its share of the host.

    Attributes:
        name: Key of :data:`GPUS`, or the driver's name of one that is not there.
        memory_nbytes: As the driver reports it; a context and everything else is taken from it.
        copy_bytes_per_s: Bytes read and written per second by a large copy on the device.
        products: Operations per second that large matrix products reach, one after the other with
            nothing else on the GPU, two per multiply-add, by dtype of the operands:
            ``"bfloat16"``, ``"float16"``, ``"float32"`` (torch's default, no TF32), ``"float8"``
            and ``"int8"``, the last two where the GPU has them.
        operator_s: Seconds in which the host issues one operator.
        context_nbytes: Device memory of a CUDA context with torch's kernels.
        error: Relative standard error of ``copy_bytes_per_s`` and ``products``.
        operator_error: Relative standard error of ``operator_s``.
    """

    name: str
    memory_nbytes: int
    copy_bytes_per_s: float
    products: Mapping[str, float]
    operator_s: float
    context_nbytes: int
    error: float = 0.1
    operator_error: float = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Nodes of equal GPUs.

    Each GPU has a link to the others in its node; the GPUs of a node share one to other nodes.
    ``nvlink`` turns codes within nodes off. ``source`` says where the numbers come from.
    """

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    within_node: Link
    between_nodes: Link
    nvlink: bool
    source: str

    @property
    def world_size(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node


# Shares of the data sheet's numbers that H200s reach, as the doctor measures them, and that are
# assumed elsewhere (`plan_accuracy.json`): copy 4222 of 4800 GB/s; products of random numbers, at
# clocks that power limits.
_COPY, _BF16, _FP16, _FP8, _INT8, _FP32 = 0.88, 0.68, 0.66, 0.64, 0.60, 0.76
# NCCL's bus bandwidth in a large all-gather or reduce-scatter over NVLink, of its rate: 0.6 by two
# GPUs, 0.7 by four; more, in proportion, is assumed of eight.
_NVLINK, _NVLINK_FEW = 0.8, 0.4
_PCIE = 0.4  # of its rate, between two GPUs through the host's memory


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Data sheet: GiB as the driver reports them, TB/s, TFLOP/s without sparsity, GB/s.

    ``peers`` is the rate to other GPUs of the node in one direction, by NVLink if ``nvlink``.
    """

    device: str
    gib: float
    memory: float
    bf16: float
    fp32: float
    fp8: float
    int8: float
    peers: float
    nvlink: bool = False


_SHEETS = {
    "H100": _Sheet("H100 80GB HBM3", 79.2, 3.35, 989, 67, 1979, 1979, 450, True),
    "H100 PCIe": _Sheet("H100 PCIe", 79.1, 2.0, 756, 51, 1513, 1513, 64),
    "H200": _Sheet("H200", 139.8, 4.8, 989, 67, 1979, 1979, 450, True),
    "B200": _Sheet("B200", 178.4, 8.0, 2250, 75, 4500, 4500, 900, True),
    "A100-80": _Sheet("A100-SXM4-80GB", 79.15, 2.04, 312, 19.5, 0, 624, 300, True),
    "A100-40": _Sheet("A100-SXM4-40GB", 39.4, 1.555, 312, 19.5, 0, 624, 300, True),
    "L40S": _Sheet("L40S", 44.4, 0.864, 362, 91.6, 733, 733, 32),
    "A10G": _Sheet("A10G", 22.1, 0.6, 70, 35, 0, 140, 32),
    "RTX 4090": _Sheet("GeForce RTX 4090", 23.6, 1.008, 165, 82.6, 330, 660, 32),
    "RTX 3090": _Sheet("GeForce RTX 3090", 23.6, 0.936, 71, 35.6, 0, 284, 32),
}
_HOPPER = {"H100", "H200"}


def _gpu(name: str, sheet: _Sheet) -> Gpu:
    products = {"bfloat16": sheet.bf16 * _BF16, "float16": sheet.bf16 * _FP16}
    products["float32"] = sheet.fp32 * _FP32
    products |= {"float8": sheet.fp8 * _FP8, "int8": sheet.int8 * _INT8}
    return Gpu(
        name=name,
        memory_nbytes=int(sheet.gib * _GIB),
        copy_bytes_per_s=sheet.memory * _COPY * _TERA,
        products={dtype: rate * _TERA for dtype, rate in products.items() if rate},
        operator_s=20e-6,  # this and the context: as on the hosts of H200s
        context_nbytes=710 * 2**20,
        error={"H200": 0.05, "H100": 0.06}.get(name, 0.12),
    )


GPUS: dict[str, Gpu] = {name: _gpu(name, sheet) for name, sheet in _SHEETS.items()}
"""What can be rented, by the name to give to ``--gpu``."""


def find_gpu(name: str) -> str | None:
    """Return the key in :data:`GPUS` of a name such as ``"h100-sxm"`` or the driver's; or None."""
    return _NAMES.get(_plain(name))


def _plain(name: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    short = [re.sub(r"^(nvidia|geforce|rtx|sxm\d?$)", "", word) for word in words]
    return "".join(short).removesuffix("gb")


_NAMES = {_plain(name): name for name in _SHEETS}
_NAMES |= {_plain(sheet.device): name for name, sheet in _SHEETS.items()} | {"a100": "A100-80"}

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_rate(rate: str | float) -> float:
    """Return the bytes per second of ``"25gbit"``, ``"10Gb/s"``, ``"12.5GB/s"`` or a number.

    A small ``b``, ``bit`` or ``bps`` means bits, a capital ``B`` bytes; a number means bytes/s.

    Raises:
        ValueError: It is no such rate, or not positive.
    """
    found = None
    if isinstance(rate, str):
        pattern = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgtKMGT]?)\s*(B/s|bit|[bB]its?/s|bps|b/s)\s*"
        found = re.fullmatch(pattern, re.sub("(?i)bit", "bit", rate))
    if found is not None:
        value = float(found[1]) * _UNITS[found[2].lower()] / (1 if found[3] == "B/s" else 8)
    else:
        value = float(rate) if is_number(rate) else math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"network {rate!r} is no rate: give one such as '25gbit', '10Gb/s' (bits), "
            "'12.5GB/s' (bytes), or a positive number of bytes per second."
        )
    return value


def network_link(rate: str | float) -> Link:
    """Return what a network of this nominal rate per node carries.

    Up to 25 Gb/s TCP reached 95.7 to 97.4% (`step_time_10gbit.json`, `step_time_25gbit.json`).
    Faster ones are assumed to have RDMA: over plain TCP NCCL reached 45 of 100 Gb/s.
    """
    nominal = parse_rate(rate)
    if nominal <= 25e9 / 8 * 1.01:
        return Link(bytes_per_s=nominal * 0.96, latency_s=50e-6, error=0.03)
    return Link(bytes_per_s=nominal * 0.9, latency_s=20e-6, error=0.12)


def make_machine(
    gpu: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | float | None = None,
    profile: str | Path | None = None,
) -> Machine:
    """Describe nodes of GPUs; arguments are those of :func:`lq_lightning.plan`.

    What is None is the profile's, else one node of eight ``"H100"``. A profile's numbers replace
    those of the table. Several nodes need ``network``, unless the profile measured it.

    Raises:
        ValueError: An argument is none of these, or contradicts the profile.
    """
    read = _NOTHING if profile is None else _read_profile(profile)
    known = read.gpu
    if gpu is None and known is None and profile is not None:
        raise ValueError(f"profile {str(profile)!r} is of a machine without GPU: give `gpu` too.")
    name = gpu or (known.name if known is not None else "H100")
    table = GPUS.get(find_gpu(name) or "")
    if known is not None and known.name not in (name, table.name if table else name):
        raise ValueError(
            f"gpu={gpu!r} is not what {profile} measured, {known.name}: leave `gpu` out, or the "
            "profile."
        )
    numbers = known or table
    if numbers is None:
        close = difflib.get_close_matches(_plain(name), _NAMES, n=1, cutoff=0.5)
        raise ValueError(
            f"gpu={name!r} is not known.{f' Do you mean {_NAMES[close[0]]!r}?' if close else ''} "
            f"Known are {', '.join(GPUS)}; for any other, run `lq-lightning doctor --profile FILE` "
            "on it and give that file as `profile`."
        )
    if known and table:  # which has what the doctor could not measure
        numbers = replace(known, products={**table.products, **known.products})
    nodes = read.nodes if nodes is None else nodes
    gpus_per_node = read.gpus_per_node if gpus_per_node is None else gpus_per_node
    check_count("plan", "nodes", nodes, 1)
    check_count("plan", "gpus_per_node", gpus_per_node, 1)
    within, nvlink = read.within_node, read.nvlink
    if within is None:
        within, nvlink = _within(name, gpus_per_node)
    between = read.between_nodes if network is None else network_link(network)
    if between is None and nodes > 1:
        raise ValueError(
            f"{nodes} nodes need `network`, the rate of each node's link to the others, such as "
            "'25gbit', or a profile that `lq-lightning doctor` wrote on two of them."
        )
    return Machine(
        gpu=numbers,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        within_node=within,
        between_nodes=between or within,  # nothing is sent between the nodes of one
        nvlink=nvlink,
        source=_source(name, network, profile, read),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What ``lq-lightning doctor`` measured; None where there was nothing to measure."""

    gpu: Gpu | None
    gpus_per_node: int
    nodes: int
    within_node: Link | None
    between_nodes: Link | None
    nvlink: bool

    def to_json(self, **more: Any) -> str:
        """Return the text that :func:`make_machine` reads, with other entries for people."""
        return json.dumps({"format": PROFILE_FORMAT, "machine": asdict(self), **more}, indent=2)


_NOTHING = Profile(
    gpu=None, gpus_per_node=8, nodes=1, within_node=None, between_nodes=None, nvlink=False
)


def _read_profile(path: str | Path) -> Profile:
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != PROFILE_FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {PROFILE_FORMAT!r}")
        read: Profile = from_plain(Profile, content["machine"])
        return read
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"profile {str(path)!r} cannot be read: {type(error).__name__}: {error}. Write it with "
            "`lq-lightning doctor --profile FILE` on such a machine."
        ) from error


def _within(name: str, gpus_per_node: int) -> tuple[Link, bool]:
    sheet = _SHEETS.get(find_gpu(name) or "")
    if sheet is None and gpus_per_node > 1:
        raise ValueError(
            f"how {name} are linked in a node of {gpus_per_node} is neither in the profile nor "
            "known: write the profile with `torchrun` on several GPUs of a node."
        )
    if sheet is None or not sheet.nvlink:
        rate = 32 if sheet is None else sheet.peers
        return Link(bytes_per_s=rate * _PCIE * _GIGA, latency_s=15e-6, error=0.3), False
    error = 0.05 if find_gpu(name) in _HOPPER else 0.1
    reached = sheet.peers * (_NVLINK - _NVLINK_FEW / max(2, gpus_per_node))
    return Link(bytes_per_s=reached * _GIGA, latency_s=20e-6, error=error), True


def _source(
    name: str, network: str | float | None, profile: str | Path | None, read: Profile
) -> str:
    """Say where the numbers are from."""
    measured, table = f"measured by `lq-lightning doctor` ({profile})", "table of the package"
    parts = [
        f"{name}: {measured if read.gpu else table}",
        f"links within nodes: {measured if read.within_node else table}",
    ]
    if network is not None:
        parts.append(f"network {network}, as given")
    elif read.between_nodes is not None:
        parts.append(f"network: {measured}")
    return "; ".join(parts)
