"""The generated sections of docs/optimizer_and_gradients.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from page_parts import Folder, ablations, markdown, missing, number, sources

# Rows of the table of gradient buffers, by their name in the report; the others are in the report.
BUFFER_CODES = {
    "int8-g32-half-steps": "INT8, scale per 32, half steps for pairs of small values (default)",
    "int8-g16": "INT8, scale per 16",
    "int8-g128": "INT8, scale per 128",
    "dynamic8-g128": "8-bit dynamic, scale per 128",
    "fp8-e4m3-g128": "FP8 E4M3, scale per 128 (AGoQ)",
    "bfloat16": "bf16, for comparison",
}
LINKS = {
    "all_reduce_10gbit": "10 Gb/s between nodes",
    "all_reduce_unlimited": "unlimited virtual link between nodes",
}
AVERAGES = ("fp32", "bf16", "quantized")


def optimizer_speed(folder: Folder) -> str:
    """Time and bytes of one step of every optimizer, a table per report."""
    reports = folder.matching("optimizer_h200*")
    if not reports:
        return missing(
            "python benchmarks/optimizer.py --out benchmarks/results/optimizer_h200.json"
        )
    return "\n".join(_speed(report) for report in reports)


def _speed(report: dict[str, Any]) -> str:
    results = report["results"]
    cases = results["cases"]
    host = any("host_ms" in case for case in cases)
    rows = []
    for case in cases:
        row = [case["optimizer"], number(case["time_ms"], 2)]
        row += [number(case.get("host_ms"), 2)] if host else []
        row += [number(case["state_bytes_per_parameter"], 3), number(case["gb_per_s"])]
        rows.append([*row, number(100 * case["share_of_copy"], 0, "%")])
    header = ["optimizer", "ms on the device", *(["ms of the host"] if host else [])]
    header += ["state bytes per parameter", "GB/s", "of a copy"]
    return (
        f"{cases[0]['numel'] / 1e6:.0f} million parameters; a device-to-device copy moves "
        f"{results['copy_gb_per_s']:.0f} GB/s.\n\n" + markdown(header, rows) + sources([report])
    )


def optimizer_error(folder: Folder) -> str:
    """Error of the update direction by pair of formats, of the library and of COAT's table 1."""
    reports = folder.matching("optimizer_error*")
    if not reports:
        return missing(
            "python benchmarks/optimizer_error.py --out benchmarks/results/optimizer_error.json"
        )
    parts = []
    for report in reports:
        results = report["results"]
        moments = results["moments"]
        if moments["checkpoint"] is None:
            origin = f"of {moments['steps']} steps of drawn gradients"
        else:
            origin = f"of {moments['matrices']} matrices of a run (`{moments['checkpoint']}`)"
        parts.append(
            f"Moments {origin}, {moments['numel']} elements. Formats of the library:\n\n"
            + _errors(results["library"])
            + "\nFormats of COAT's table 1:\n\n"
            + _errors(results["coat"])
            + sources([report])
        )
    return "\n".join(parts)


def _errors(pairs: list[dict[str, Any]]) -> str:
    by_pair = {(pair["first"], pair["second"]): pair for pair in pairs}
    names = list(dict.fromkeys(first for first, _ in by_pair))
    rows = [[m, *(f"{by_pair[m, v]['mse']:.3g}" for v in names)] for m in names]
    rows.append(
        ["second moments lost", *(f"{100 * by_pair[names[0], v]['lost']:.2g}%" for v in names)]
    )
    return markdown(["m \\ v", *names], rows)


def optimizer_fidelity(folder: Folder) -> str:
    """Losses of runs whose optimizer states are codes."""
    command = (
        'python benchmarks/ablation.py --preset gpt_125m --variants "full precision,AdamW '
        'expanded_fp8,AdamW dynamic8,AdamW fp8,AdamW int8" '
        "--json benchmarks/results/ablation_NAME.json"
    )
    return ablations(folder, lambda name: name.startswith("AdamW "), command)


def gradient_buffer(folder: Folder) -> str:
    """Error of gradient sums by code and number of micro-batches."""
    report = folder.report("gradient_buffer")
    if report is None:
        return missing(
            "python benchmarks/gradient_buffer.py --json benchmarks/results/gradient_buffer.json"
        )
    results = report["results"]
    counts, errors = results["microbatches"], results["errors"]["gpt"]
    rows = []
    for code, name in BUFFER_CODES.items():
        if code in errors:
            stored = [number(100 * error, 2) for error in errors[code]["stored"]]
            rows.append([name, number(results["nbytes_per_parameter"][code], 3), *stored])
    header = ["code", "bytes per parameter", *(f"{n} micro-batches, %" for n in counts)]
    header[2] = header[2].replace("1 micro-batches", "1 micro-batch")
    return markdown(header, rows) + sources([report])


def gradient_memory(folder: Folder) -> str:
    """What accumulation holds and how long it takes, and the speed of its kernels."""
    report = folder.report("gradient_memory")
    if report is None:
        return missing("benchmarks/run_gradients.sh benchmarks/results")
    results = report["results"]
    model, world = results["model"], results["world_size"]
    windows = [
        [
            f"gradients in {name}" if name == "fp32" else f"gradients in {name} codes",
            number(window["held_bytes_per_parameter"], 3),
            number(window["peak_bytes_per_parameter"], 3),
            number(window["window_ms"]),
        ]
        for name, window in results["windows"].items()
    ]
    kernels = [
        [
            kernel["kernel"],
            f"{kernel['numel'] / 2**20:g}",
            number(kernel["us"], 1),
            number(100 * kernel["share_of_copy"], 0, "%"),
        ]
        for kernel in results["kernels"]
    ]
    header = ["", "held, bytes per parameter", "peak, bytes per parameter", "ms per window"]
    return (
        f"{model['layers']} layers, hidden {model['hidden']}, sequence {model['seq']}, micro-batch "
        f"{model['batch']}, {results['micro_batches']} micro-batches, {world} "
        f"rank{'s' if world > 1 else ''}:\n\n"
        + markdown(header, windows)
        + "\n"
        + markdown(["kernel", "Mi elements", "us", "of a copy"], kernels)
        + sources([report])
    )


def all_reduce(folder: Folder) -> str:
    """Time of an 8-bit all-reduce against those in fp32 and bf16, by network and size."""
    reports = {name: folder.report(name) for name in LINKS}
    if not any(reports.values()):
        return missing("benchmarks/run_gradients.sh benchmarks/results")
    parts = []
    for name, link in LINKS.items():
        report = reports[name]
        if report is None:
            parts.append(f"{link}: not measured yet.\n")
            continue
        results = report["results"]
        rows = [
            [
                f"{row['nbytes'] / 2**20:g} MiB",
                *(number(row["ms"][average], 2) for average in AVERAGES),
                f"**{row['speedup']:.2f}x**",
                f"{row['ms']['bf16'] / row['ms']['quantized']:.2f}x",
                number(100 * row["relative_error"], 2, "%"),
            ]
            for row in results["rows"]
        ]
        header = ["fp32 tensor", "fp32, ms", "bf16, ms", "8 bits, ms"]
        header += ["against fp32", "against bf16", "error"]
        node_size = results["node_size"] or results["world_size"]
        parts.append(
            f"{results['world_size']} ranks in nodes of {node_size}, {link} "
            f"({results['bits_per_element']:.3f} bits per element):\n\n{markdown(header, rows)}\n"
            f"{_crossover(results['crossover_nbytes'])}{sources([report])}"
        )
    return "\n".join(parts)


def _crossover(nbytes: int | None) -> str:
    if nbytes is None:
        return "The largest size is not faster than fp32.\n"
    return f"From {nbytes / 2**20:g} MiB on it is never slower than fp32.\n"


SECTIONS: dict[str, Callable[[Folder], str]] = {
    "optimizer_speed": optimizer_speed,
    "optimizer_error": optimizer_error,
    "optimizer_fidelity": optimizer_fidelity,
    "gradient_buffer": gradient_buffer,
    "gradient_memory": gradient_memory,
    "all_reduce": all_reduce,
}
