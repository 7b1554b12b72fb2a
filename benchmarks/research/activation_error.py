"""Error of gradients when saved activations are codes, by site of a trained model, and its bias.

The measurement of AGoQ's table 13: activations and the gradients that reach them are taken from
models trained here (``trained_models.py``, early and late in training); each gradient is computed
once from what a forward would have saved and once from its codes, all else exact. The error is
``|g' - g| / |g|`` in the L2 norm, a mean over layers and batches::

    python benchmarks/research/trained_models.py outputs/models
    python benchmarks/research/activation_error.py outputs/models/*.pt --out error.json
    python benchmarks/research/activation_error.py outputs/models/llama_0600.pt --outliers 30

``bias`` asks whether errors of weight gradients average out over batches: ``bias`` is the size of
the expected error and ``shrinkage`` its part along the gradient, both relative to the expected
gradient and free of the noise of finitely many batches; ``added variance`` compares the error of
one batch with the noise of the gradient itself. ``whole model`` is what a policy of the library
does to the gradient of all weights, errors of later layers included. ``--outliers`` gives norms
what large models have and these have not: a few channels of many times the others' size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from activation_capture import Layer, NormSite, capture
from activation_gradients import (
    ALTERNATIVES,
    GATED,
    Gradients,
    RoundTrip,
    exact,
    layer_gradients,
    mlp_gradients,
    norm_gradients,
)
from coded_attention import coded_attention
from common import table, write_report
from corpus import standard_library
from torch import Tensor, nn
from trained_models import KINDS, SEQ, batch, build, loss_of

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.policy import CODECS, RECIPES
from lq_lightning.codecs import CodecSpec, decode, encode

WIDTH = 4096  # of a norm with outliers
OUTLIERS = (17, 1041, 2100, 3333)

Sums = dict[tuple[str, str, int], tuple[Tensor, float]]
Row = dict[str, Any]
Errors = dict[str, dict[str, list[float]]]  # by code and gradient, of every layer


# --- codes ----------------------------------------------------------------------------------------


def _spec(name: str) -> CodecSpec:
    """Read ``CODE [asym]/GROUP [HSIZE]``."""
    left, _, right = name.partition("/")
    code, _, asymmetric = left.partition(" ")
    group, _, hadamard = right.partition(" H")
    return CodecSpec(
        code=code,  # type: ignore[arg-type]
        group_size=int(group),
        symmetric=not asymmetric,
        hadamard_size=int(hadamard or 0),
        scale_dtype="bfloat16",
    )


FEW = (
    *("fp4_e2m1/128", "nf4/128", "nf4/64", "nf4/128 H128", "int4/128", "int4/128 H128"),
    *(
        "int4 asym/128",
        "int4 asym/64",
        "int4 asym/128 H128",
        "int5 asym/128",
        "int5 asym/64",
        "int8/128",
        "fp8_e4m3/16",
    ),
)
BY_LAYER = ("fp4_e2m1/128", "nf4/64", "int4 asym/128", "int4 asym/128 H128")
SPECS = {
    name: _spec(name)
    for name in (
        *FEW,
        *("fp4_e2m1/64", "fp4_e2m1/32", "fp4_e2m1/16", "fp4_e2m1/128 H128"),
        *("nf4/32", "nf4/128 H32", "nf4/128 H64", "nf4/64 H64"),
        *("int4/64", "int4/32", "int4/128 H32", "int4/128 H64", "int4/64 H64"),
        *("int4 asym/32", "int4 asym/128 H32", "int4 asym/128 H64", "int4 asym/64 H64"),
        *("int3 asym/128", "int3 asym/128 H128", "int5 asym/128 H128"),
        *("int6 asym/128", "int6 asym/128 H128", "int8/128 H128", "fp8_e4m3/128"),
    )
}


def round_trip(spec: CodecSpec) -> RoundTrip:
    """Return what a code makes of a tensor, taken as one flat row."""

    def through(x: Tensor) -> Tensor:
        flat = x.reshape(1, -1)
        return decode(spec, encode(spec, flat), flat.shape[1]).view(x.shape)

    return through


def relative(found: Tensor, true: Tensor) -> float:
    """Return ``|found - true| / |true|``."""
    found, true = found.detach(), true.detach()
    return float((found - true).norm() / true.norm())


# --- errors ---------------------------------------------------------------------------------------


def errors(batches: Sequence[list[Layer]], names: Sequence[str], how: str) -> Errors:
    """Return errors, means over batches."""
    results: Errors = {name: {} for name in names}
    for index in range(len(batches[0])):
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for layers in batches:
            true = layer_gradients(layers[index], exact, how)
            for name in names:
                coded = layer_gradients(layers[index], round_trip(SPECS[name]), how)
                for gradient, value in coded.items():
                    found[name, gradient].append(relative(value, true[gradient]))
        for (name, gradient), values in found.items():
            results[name].setdefault(gradient, []).append(statistics.mean(values))
    return results


def rows_of(
    model: str, how: str, found: dict[str, dict[str, list[float]]], numel: int
) -> list[Row]:
    """Return a row per code with the means over layers."""
    return [
        {"model": model, "how": how, "code": name, "bits": SPECS[name].bits_per_element(numel)}
        | {gradient: statistics.mean(values) for gradient, values in by_gradient.items()}
        for name, by_gradient in found.items()
    ]


def with_outliers(site: NormSite, size: float) -> NormSite:
    """Return a norm of ``WIDTH`` channels, copies of a site's, a few of them ``size`` times larger.

    Its weight undoes the size, as trained weights do, so that its output is about the same.
    """
    tokens, copies = 256, WIDTH // site.x_TN.shape[1]
    x = site.x_TN[:tokens].repeat(1, copies)
    before = x.square().mean(1).sqrt()
    x[:, OUTLIERS] *= size
    weight = site.weight_N.repeat(copies) * (x.square().mean(1).sqrt() / before).mean()
    weight[list(OUTLIERS)] /= size
    return replace(
        site,
        x_TN=x,
        weight_N=weight,
        bias_N=None if site.bias_N is None else site.bias_N.repeat(copies),
        dy_TN=site.dy_TN[:tokens].repeat(1, copies),
        dout_TM=site.dout_TM[:tokens],
    )


def outlier_rows(
    model: str, layers: Sequence[Layer], names: Sequence[str], size: float
) -> list[Row]:
    """Return the errors of norms with outliers, a mean over every third layer, a row per code."""
    found: Errors = {name: defaultdict(list) for name in names}
    for layer in layers[1::3]:
        for norm in layer.norms:
            site = with_outliers(norm, size)
            true = norm_gradients(site, exact)
            for name in names:
                for gradient, value in norm_gradients(site, round_trip(SPECS[name])).items():
                    found[name][gradient].append(relative(value, true[gradient]))
    return rows_of(model, f"outliers x{size:g}", found, 256 * WIDTH)


# --- bias -----------------------------------------------------------------------------------------


def weight_gradients(layer: Layer, code: RoundTrip) -> Gradients:
    """Return the gradients of weights behind norms and activation functions."""
    places = zip(("attention", "mlp"), layer.norms, strict=True)
    found = {f"norm ({p})": norm_gradients(site, code)["norm linears"] for p, site in places}
    of_mlp = mlp_gradients(layer.mlp, code)
    return found | {"down": next(v for k, v in of_mlp.items() if k.endswith("down")).detach()}


def collect(model: nn.Module, data: Any, names: Sequence[str], count: int, size: int) -> Sums:
    """Sum gradients (named ``""``) and errors of codes, and their squares, over batches."""
    sums: Sums = {}

    def add(name: str, gradient: str, depth: int, value: Tensor) -> None:
        total, squares = sums.get((name, gradient, depth), (torch.zeros_like(value), 0.0))
        squares += float(value.double().square().sum())
        sums[name, gradient, depth] = (total + value, squares)

    for index in range(count):
        layers = capture(model, *batch(data, slice(index * size, (index + 1) * size)))
        for depth, layer in enumerate(layers):
            true = weight_gradients(layer, exact)
            for gradient, value in true.items():
                add("", gradient, depth, value)
            for name in names:
                for gradient, value in weight_gradients(layer, round_trip(SPECS[name])).items():
                    add(name, gradient, depth, value - true[gradient])
    return sums


def bias(sums: Sums, count: int) -> list[Row]:
    """Return size and direction of the expected error by code and kind of weight, over all layers.

    With ``e`` the error and ``g`` the gradient of a batch, over ``count`` batches: an unbiased
    estimate of ``|E e|^2`` is ``(|sum e|^2 - sum |e|^2) / (count (count - 1))``, and so for ``g``.
    """

    def moments(name: str, gradient: str) -> tuple[float, float]:
        """Return the squared norm of the expectation, and the variance."""
        of = [value for key, value in sums.items() if key[:2] == (name, gradient)]
        squares = sum(square for _, square in of)
        totals = sum(float(total.double().square().sum()) for total, _ in of)
        squared = (totals - squares) / (count * (count - 1))
        return squared, squares / count - squared

    rows = []
    for name, gradient in dict.fromkeys(key[:2] for key in sums if key[0]):
        depths = [key[2] for key in sums if key[:2] == (name, gradient)]
        pairs = [(sums[name, gradient, d][0], sums["", gradient, d][0]) for d in depths]
        along = sum(float((e * g).double().sum()) for e, g in pairs)
        energy = sum(float(g.double().square().sum()) for _, g in pairs)
        (squared, variance), (signal, noise) = moments(name, gradient), moments("", gradient)
        rows.append(
            {
                "code": name,
                "weights": gradient,
                "error of a batch": ((squared + variance) / (signal + noise)) ** 0.5,
                "bias": max(0.0, squared / signal) ** 0.5,
                "shrinkage": -along / energy,
                "added variance": variance / noise,
            }
        )
    return rows


# --- whole models ---------------------------------------------------------------------------------


def whole_gradients(model: nn.Module, data: Any, count: int, size: int) -> list[Tensor]:
    """Return the gradient of all weights of each batch, as one vector."""
    found = []
    for index in range(count):
        model.zero_grad()
        loss_of(model, *batch(data, slice(index * size, (index + 1) * size))).backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    return found


def whole_model(model: nn.Module, data: Any, count: int, size: int) -> dict[str, float]:
    """Return by recipe the error of the gradient of all weights, a mean over batches."""
    true = whole_gradients(model, data, count, size)
    found = {}

    def measure(name: str) -> None:
        coded = whole_gradients(model, data, count, size)
        found[name] = statistics.mean(map(relative, coded, true))

    for name, policy in RECIPES.items():
        handle = quantize_activations(model, policy)
        measure(name)
        handle.remove()
    handle = quantize_activations(
        model, ActivationPolicy(norm="int4_hadamard", activation="int4", linear="int4")
    )
    with coded_attention(CODECS["int4"]):
        measure("uniform 4 bits")
    handle.remove()
    return found


# --- command line ---------------------------------------------------------------------------------


def load(path: Path, vocab: int) -> nn.Module:
    """Read a model that ``trained_models.py`` wrote."""
    kind = path.name.partition("_")[0]
    if kind not in KINDS:
        raise SystemExit(f"{path} is no model: its name starts with {' or '.join(KINDS)}")
    model = build(kind, vocab)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


def show(rows: Sequence[Row]) -> str:
    """Lay out rows that have the same keys, but for what all have in common."""
    keys = [key for key in rows[0] if key not in ("model", "how")]
    cells = [
        [f"{v:.4f}" if isinstance(v, float) else v for v in map(row.get, keys)] for row in rows
    ]
    return table(cells, keys)


def rounded(value: Any) -> Any:
    """Keep four digits of every number."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, list) else value


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model, print and return everything."""
    corpus = standard_library(SEQ, args.text)
    model = load(path, corpus.vocab)
    slices = [slice(i * args.batch, (i + 1) * args.batch) for i in range(args.batches)]
    captured = [capture(model, *batch(corpus.val, rows)) for rows in slices]
    numel = captured[0][0].x_BSN.numel()
    rows, layers = [], {}
    gated = captured[0][0].mlp.up_TN is not None
    few = [name for name in args.codes if name in FEW]
    for how in ("rebuilt", *(name for name in ALTERNATIVES if gated or name not in GATED)):
        found = errors(captured, args.codes if how == "rebuilt" else few, how)
        if how == "rebuilt":
            layers = {name: found[name] for name in args.codes if name in BY_LAYER}
        if found:
            rows += (made := rows_of(path.stem, how, found, numel))
            print(f"{path.stem}, {how}:\n{show(made)}\n", flush=True)
    for size in args.outliers if few else ():
        rows += (made := outlier_rows(path.stem, captured[0], few, size))
        print(f"{path.stem}, outliers x{size:g}:\n{show(made)}\n", flush=True)
    biased = []
    if args.bias:
        biased = bias(collect(model, corpus.val, few, args.bias, args.batch), args.bias)
        print(f"{path.stem}, bias over {args.bias} batches:\n{show(biased)}\n", flush=True)
    whole = whole_model(model, corpus.val, args.batches, args.batch)
    print(f"{path.stem}, gradient of the whole model: {whole}\n", flush=True)
    return {
        "rows": rows,
        "layers": {path.stem: layers},
        "bias": [{"model": path.stem} | row for row in biased],
        "whole model": {path.stem: whole},
    }


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--codes", default=",".join(SPECS), help=f"of {', '.join(SPECS)}")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--bias", type=int, default=24, help="batches to find the bias from")
    parser.add_argument("--outliers", type=float, nargs="*", default=[], help="sizes")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    args = parser.parse_args()
    args.codes = args.codes.split(",")
    unknown = sorted(set(args.codes) - set(SPECS))
    if unknown:
        parser.error(f"unknown codes {unknown}: choose among {', '.join(SPECS)}")
    results: dict[str, Any] = {"rows": [], "layers": {}, "bias": [], "whole model": {}}
    for path in args.models:
        for key, found in measure(path, args).items():
            results[key] = results[key] + found if key in ("rows", "bias") else results[key] | found
    write_report(args.out, "activation_error", rounded(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
