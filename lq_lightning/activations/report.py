"""What quantized activations save, per kind of module: before, after, in which format, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from lq_lightning._compat.modules import has_forward_hooks
from lq_lightning.codecs import CodecSpec
from lq_lightning.kernels.message.matrix import matrix_shape

from .find import Found, Unsupported
from .measure import SavedTensors
from .policy import CODECS, fit_codec
from .sites import (
    ActivationSite,
    FunctionSite,
    HookSite,
    LinearSite,
    MLPSite,
    NormSite,
    Site,
    is_checkpointed,
)
from .sources import MatrixCodes, Source, attach

_TOKENS = 128
_OUTSIDE = "outside"
_LISTED = 3  # layers named in a line
_KINDS: dict[type[Site], str] = {
    **{NormSite: "norm", MLPSite: "MLP", LinearSite: "linear"},
    **dict.fromkeys((ActivationSite, FunctionSite), "activation"),
}
_NOTES = {
    _OUTSIDE: "of the model, such as a loss",
    "attention": "kept in full precision",
    "checkpoint": "inputs of checkpointed layers; the rest only while one is computed again",
    "linear": "inputs rebuilt from codes of norms and activations, others kept",
    "other": "not all recognized: packed by rule",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRow:
    """One kind of module: ``"norm"``, ``"MLP"``, ``"activation"``, ``"linear"``, ``"attention"``,
    ``"checkpoint"``, ``"other"``, or the name of a class.

    ``before`` and ``after`` are bytes that the modules saved, and save now: per token, or in all
    where it was measured. None if it cannot be told without running the model.
    """

    kind: str
    count: int  # of modules
    before: float | None
    after: float | None
    format: str  # of their codes, "-" if they make none
    bits: float | None  # per value of a code, with scales
    note: str  # exceptions, and why


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationReport:
    """A table of saved activations; ``str()`` lays it out."""

    rows: tuple[ReportRow, ...]  # by kind of module
    unsupported: tuple[Unsupported, ...]  # not recognized, and linear layers without FP8 products
    measured: bool  # whether bytes were counted in a forward, not derived per token

    @property
    def before(self) -> float:
        """Sum of the rows whose bytes are known."""
        return sum(row.before or 0.0 for row in self.rows)

    @property
    def after(self) -> float:
        """Sum of the rows whose bytes are known."""
        return sum(row.after or 0.0 for row in self.rows)

    def __str__(self) -> str:
        """Lay out as a table."""
        unit = "MB" if self.measured else "bytes/token"
        some = any(row.before is None for row in self.rows) and not self.measured
        before, after = (_bytes(v, measured=self.measured) for v in (self.before, self.after))
        cells: list[tuple[str, ...]] = [
            ("saved for backward", "modules", f"before, {unit}", "after", "format", "bits", "note"),
            *(
                (
                    row.kind,
                    str(row.count),
                    _bytes(row.before, measured=self.measured),
                    _bytes(row.after, measured=self.measured),
                    row.format,
                    "-" if row.bits is None else f"{row.bits:.2f}",
                    row.note,
                )
                for row in self.rows
            ),
            ("together" + ", where known" * some, "", before, after, "", "", ""),
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        lines += [
            f"{part.count} x {', '.join(part.modules)}: {part.reason}" for part in self.unsupported
        ]
        return "\n".join(lines)


def _bytes(value: float | None, *, measured: bool) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.3f}" if measured else f"{value:.0f}"


@contextmanager
def without_sites(sites: Iterable[Site]) -> Iterator[None]:
    """Let all sites compute as if they were not there."""
    enabled = [(site, site.enabled) for site in sites]
    for site, _ in enabled:
        site.enabled = False
    try:
        yield
    finally:
        for site, was in enabled:
            site.enabled = was


def _widths(module: nn.Module, site: Site) -> tuple[int | None, int | None]:
    """Lengths of the rows that a module takes and that it encodes, where it says so itself."""
    if isinstance(site, NormSite):
        parameter = next(module.parameters(recurse=False), None)
        shape: Any = module.normalized_shape if parameter is None else parameter.shape
        return int(shape[0]), int(shape[0])
    if not isinstance(site, MLPSite):
        return None, None
    gate = getattr(module, site.gate)
    width = getattr(gate, "in_features", None) or getattr(gate, "nx", None)
    inner = getattr(gate, "out_features", None) or getattr(gate, "nf", None)
    halves = 2 if site.gate == site.up else 1
    return (
        width if isinstance(width, int) else None,
        inner // halves if isinstance(inner, int) else None,
    )


def _bytes_per_token(module: nn.Module, width: int, codec: CodecSpec | None) -> float:
    """Bytes that a module by itself saves for a token; nothing is computed.

    Its input is taken to have a source, as behind a norm, in the format of ``codec``, in which
    dropout of adapters lets a code be made.
    """
    values = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(
            value.requires_grad
        )
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    dtype = next((v.dtype for v in values.values()), torch.get_default_dtype())
    x = torch.empty(1, _TOKENS, width, dtype=dtype, device="meta", requires_grad=True)
    format = fit_codec(codec or CODECS["int8"], width).message_format
    nothing = MatrixCodes(width, str(format))
    attach(x, Source(nothing, (), x.new_empty(0)))  # its code is counted where the input is made
    with torch.enable_grad(), SavedTensors(module, extra=tuple(values.values())) as saved:
        functional_call(module, values, (x,))
    return saved.nbytes / _TOKENS


def _format(codec: CodecSpec | None, width: int | None) -> tuple[str, float | None]:
    if codec is None:
        return "-", None
    fitted = fit_codec(codec, width or 4096)
    rows, row = matrix_shape(fitted.message_format, 4096, width or 4096)
    bits = rows * fitted.message_format.layout(row).nbytes * 8 / (4096 * (width or 4096))
    name = fitted.code + (" hadamard" if codec.hadamard_size else "")
    return f"{name}, groups of {fitted.group_size}", bits


def _kind(site: Site) -> str | None:
    if isinstance(site, HookSite):
        return None if site.codec is None and site.kind != "attention" else site.kind
    return _KINDS.get(type(site))


def _kind_of(name: str | None, sites: dict[str, Site], classes: dict[str, str]) -> str:
    """Kind of the module that saved a tensor, or of the module that it is part of."""
    if name is None:
        return _OUTSIDE
    parts = name.split(".")
    linear = False
    for end in range(len(parts), -1, -1):
        prefix = ".".join(parts[:end])
        site = sites.get(prefix)
        kind = None if site is None else _kind(site)
        if kind == "linear":
            linear = True
        elif kind is not None and (kind != "checkpoint" or prefix == name):
            return kind
        if end and "attention" in classes.get(prefix, "").lower():
            return "attention"
    return "linear" if linear else classes[name]


def _measured(saved: SavedTensors, found: Sequence[Found]) -> dict[str, float]:
    sites = {part.site.name: part.site for part in found}
    classes = {name: type(module).__name__ for name, module in saved.model.named_modules()}
    totals: dict[str, float] = {}
    for storage in saved.storages:
        kind = _kind_of(storage.module, sites, classes)
        totals[kind] = totals.get(kind, 0.0) + storage.nbytes
    return totals


@dataclass(slots=True)
class _Group:
    """Modules of one kind and format."""

    count: int = 0
    before: float | None = None
    after: float | None = None


def _static(found: Sequence[Found]) -> dict[tuple[str, str, float | None], _Group]:
    groups: dict[tuple[str, str, float | None], _Group] = {}
    known: dict[Any, tuple[float, float]] = {}
    for part in found:
        kind, (width, encoded) = _kind(part.site), _widths(part.module, part.site)
        if kind is None or (kind == "checkpoint" and not is_checkpointed(part.module)):
            continue
        format, bits = _format(part.site.codec, encoded)
        group = groups.setdefault((kind, format, bits), _Group())
        group.count += 1
        packed = any(not p.is_floating_point() for p in part.module.parameters())
        if width is None or packed or has_forward_hooks(part.module):
            continue  # weights as codes of another library; hooks may gather or distribute weights
        key = (type(part.module), repr(part.module), part.site.codec)
        if key not in known:
            inside = {id(m) for m in part.module.modules()}
            with without_sites(f.site for f in found if id(f.module) in inside):
                before = _bytes_per_token(part.module, width, part.site.codec)
            known[key] = before, _bytes_per_token(part.module, width, part.site.codec)
        before, after = known[key]
        group.before = (group.before or 0.0) + before
        group.after = (group.after or 0.0) + after
    return groups


def make_report(
    found: Sequence[Found],
    unsupported: Sequence[Unsupported],
    before: SavedTensors | None,
    after: SavedTensors | None,
) -> ActivationReport:
    """Report on sites.

    ``before`` and ``after`` count what a forward saved without and with them; None for bytes per
    token.
    """
    groups = _static(found)
    measured = before is not None or after is not None
    totals = [{} if saved is None else _measured(saved, found) for saved in (before, after)]
    known = {kind for kind, _, _ in groups}
    for kind in dict.fromkeys([*totals[0], *totals[1]]):
        if kind not in known:
            groups[kind, "-", None] = _Group()
    rows: list[ReportRow] = []
    seen: set[str] = set()
    for (kind, format, bits), group in groups.items():
        nbytes = [group.before, group.after]
        if measured:  # totals of a kind stand in its first row
            nbytes = [t.get(kind, 0.0) if t and kind not in seen else None for t in totals]
        seen.add(kind)
        note = _NOTES.get(kind, "" if group.count else "left as it is")
        if kind in ("norm", "MLP", "activation") and bits is None and group.count:
            note = "as they are, or inside of what is recomputed"
        rows.append(
            ReportRow(
                kind=kind,
                count=group.count,
                before=nbytes[0],
                after=nbytes[1],
                format=format,
                bits=bits,
                note=note,
            )
        )
    return ActivationReport(
        rows=tuple(rows), unsupported=(*unsupported, *_native(found)), measured=measured
    )


def _native(found: Sequence[Found]) -> Iterator[Unsupported]:
    """Linear layers whose products are not in FP8, though the policy's are."""
    names: dict[str, list[str]] = {}
    for part in found:
        if isinstance(part.site, LinearSite) and part.site.native:
            names.setdefault(part.site.native, []).append(part.site.name)
    for why, layers in names.items():
        listed = (*layers[:_LISTED], *(["..."] if len(layers) > _LISTED else []))
        reason = f"products stay native: {why}; a rule with a `matmul` of its own changes that"
        yield Unsupported(modules=listed, count=len(layers), reason=reason)
