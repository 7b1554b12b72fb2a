"""The generated sections of docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ablation_report import BASELINE, changes, mean_percent, to_outcomes, training_changes
from page_parts import Folder, ablations, loss_table, markdown, missing, number, sources

NETWORKS = {
    "nvlink": "one NVLink node",
    "unlimited": "2x2, unlimited",
    "100gbit": "2x2, 100 Gb/s",
    "25gbit": "2x2, 25 Gb/s",
    "10gbit": "2x2, 10 Gb/s",
}
VARIANTS = {
    "fsdp2": "FSDP2",
    "fsdp2-bf16-reduce": "FSDP2, bf16 reduction",
    "quantized": "SDP4Bit, `full`",
    "quantized-node": "SDP4Bit, `node`",
    "quantized-feedback": "SDP4Bit, error feedback",
    "quantized-vocabulary-8": "SDP4Bit, vocabulary in 8 bits",
    "quantized-2-bits": "vocabulary in 8, rest in 2 bits",
}
# Endings of reports of whole sessions, and what stands above their tables.
SESSIONS = {
    "": "",
    "_stochastic": "\nAn earlier session on another host, with stochastic rounding:\n\n",
}
GIB = 2**30


def step_times(folder: Folder, suffix: str = "") -> dict[str, dict[str, Any]]:
    """Return the step-time reports that exist, by network."""
    reports = {label: folder.report(f"step_time_{label}{suffix}") for label in NETWORKS}
    return {label: report for label, report in reports.items() if report is not None}


def _by_session(folder: Folder, table: Callable[[dict[str, dict[str, Any]]], str]) -> str:
    """Make a table of the step times of each session that has any."""
    tables = ((heading, table(step_times(folder, suffix))) for suffix, heading in SESSIONS.items())
    shown = "".join(heading + text for heading, text in tables if text)
    return shown or missing("benchmarks/run_all.sh nvlink rates")


def step_time(folder: Folder) -> str:
    """Milliseconds per step of every variant on every network, by session."""
    return _by_session(folder, _step_time_table)


def _measured_in(reports: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the names of the variants that any of the reports has."""
    measured = {v for report in reports.values() for v in report["results"]["variants"]}
    return {variant: name for variant, name in VARIANTS.items() if variant in measured}


def _step_time_table(reports: dict[str, dict[str, Any]]) -> str:
    if not reports:
        return ""
    rows = []
    variants = _measured_in(reports)
    for label, name in NETWORKS.items():
        results = reports.get(label, {}).get("results", {"setup": {}, "variants": {}})
        base = results["variants"].get("fsdp2", {}).get("step_ms")
        row = [name, number(results["setup"].get("link_gbit_per_s"), 1)]
        for variant in variants:
            result = results["variants"].get(variant)
            row.append(_step(result, None if variant == "fsdp2" else base))
        rows.append(row)
    header = ["network between nodes", "link, Gb/s", *(f"{v}, ms" for v in variants.values())]
    return markdown(header, rows) + _missing_rates(reports) + sources(reports.values())


def _step(result: dict[str, Any] | None, base: float | None) -> str:
    if result is None:
        return "-"
    spread = f"{result['step_ms_min']:.0f} to {result['step_ms_max']:.0f}"
    faster = f", **{base / result['step_ms']:.2f}x**" if base else ""
    return f"{result['step_ms']:.0f}{faster} ({spread})"


def _missing_rates(reports: dict[str, Any]) -> str:
    absent = [name for label, name in NETWORKS.items() if label not in reports]
    if not absent:
        return ""
    return f"\n{'; '.join(absent)}: not measured yet, see [Reproduce](#reproduce).\n"


def bytes_sent(folder: Folder) -> str:
    """Bytes per step, counted by the collectives and by the interface."""
    report = folder.report("step_time_unlimited")
    if report is None:
        return missing("benchmarks/run_all.sh rates")
    rows = []
    measured = report["results"]["variants"]
    for variant, name in VARIANTS.items():
        if variant in measured:
            result = measured[variant]
            keys = ("sent_bytes", "sent_inter_bytes", "interface_bytes")
            values = [number(None if result[k] is None else result[k] / 1e6) for k in keys]
            rows.append([name, *values, number(result["peak_memory_gib"], 1)])
    header = ["", "sent by a rank, MB", "between nodes, MB", "on a node's wire, MB", "peak GiB"]
    return markdown(header, rows) + sources([report])


def exposed(folder: Folder) -> str:
    """Milliseconds per step in which the GPU does not compute, by session."""
    return _by_session(folder, _exposed_table)


def _exposed_table(reports: dict[str, dict[str, Any]]) -> str:
    rows, estimated = [], False
    variants = _measured_in(reports)
    for label, name in NETWORKS.items():
        row = [name]
        for variant in variants:
            text, guess = _exposed(reports, label, variant)
            estimated |= guess
            row.append(text)
        if any(cell != "-" for cell in row[1:]):
            rows.append(row)
    if not rows:
        return ""
    header = ["network between nodes", *(f"{v}, ms" for v in variants.values())]
    note = "\n~ not profiled: its step time less the compute time at the unlimited rate.\n"
    used = [reports[label] for label in NETWORKS if label in reports]
    return markdown(header, rows) + (note if estimated else "") + sources(used)


def _exposed(reports: dict[str, Any], label: str, variant: str) -> tuple[str, bool]:
    """Return the cell, and whether it is an estimate."""

    def result(of: str) -> dict[str, Any]:
        found: dict[str, Any] = reports.get(of, {}).get("results", {}).get("variants", {})
        return found.get(variant) or {}

    here = result(label)
    if here.get("exposed_ms") is not None:
        whole = here["exposed_ms"] + here["compute_ms"]
        return f"{here['exposed_ms']:.0f} ({here['exposed_ms'] / whole:.0%})", False
    compute = result("unlimited").get("compute_ms")
    if label == "nvlink" or compute is None or "step_ms" not in here:
        return "-", False
    waiting = here["step_ms"] - compute
    return f"~{waiting:.0f} ({waiting / here['step_ms']:.0%})", True


def trace(folder: Folder) -> str:
    """What one profiled step spends its time with, and its picture."""
    report = folder.report("trace")
    if report is None:
        return missing(
            "benchmarks/timeline.py outputs/traces/... --json benchmarks/results/trace.json"
        )
    traces = report["results"]["traces"]
    pictures = ""
    for name in traces:
        picture = folder.picture(name, f"Timeline of one step, {name.replace('_', ', ')}")
        pictures += f"{picture}\n" if picture else ""
    kinds = list(dict.fromkeys(kind for times in traces.values() for kind in times["kinds"]))
    labels = {
        "step_ms": "step",
        "compute_ms": "compute",
        "exposed_ms": "exposed",
        "exposed_communicating_ms": "exposed, another stream is busy",
        "exposed_idle_ms": "exposed, nothing runs",
    }
    rows = [[label, *(f"{t[key]:.1f}" for t in traces.values())] for key, label in labels.items()]
    rows.append(["network", *(_overlapped(t, "network_") for t in traces.values())])
    for kind in kinds:
        rows.append([kind, *(_overlapped(t["kinds"].get(kind), "") for t in traces.values())])
    header = ["ms (share beside compute)", *(name.replace("_", ", ") for name in traces)]
    runs = "; ".join(
        f"{name}: {t['world_size']} ranks on {t['gpu']}, commit {t['commit']}"
        for name, t in traces.items()
    )
    note = f"\nFrom [trace.json](../benchmarks/results/trace.json) ({runs}).\n"
    return pictures + markdown(header, rows) + note


def _overlapped(times: dict[str, float] | None, prefix: str) -> str:
    if times is None:
        return "-"
    return f"{times[f'{prefix}ms']:.1f} ({times[f'{prefix}overlapped']:.0%})"


def compiled(folder: Folder) -> str:
    """Milliseconds per step with compiled blocks, and without."""
    reports = step_times(folder, "_compile")
    if not reports:
        return missing("benchmarks/run_all.sh compile")
    commits = {report["environment"]["commit"] for report in reports.values()}
    sessions = [step_times(folder, suffix) for suffix in SESSIONS]
    eager = {
        label: report
        for session in sessions
        for label, report in session.items()
        if report["environment"]["commit"] in commits
    }
    rows = []
    for label, report in reports.items():
        row = [NETWORKS[label]]
        for variant in ("fsdp2", "quantized"):
            for source in (eager.get(label), report):
                variants = {} if source is None else source["results"]["variants"]
                row.append(_step(variants.get(variant), None))
        rows.append(row)
    header = ["network between nodes", "FSDP2, ms", "compiled, ms", "SDP4Bit, ms", "compiled, ms"]
    used = [*(eager[label] for label in reports if label in eager), *reports.values()]
    return markdown(header, rows) + sources(used)


def memory(folder: Folder) -> str:
    """Measured and predicted memory of every variant."""
    report = folder.report("memory")
    if report is None:
        return missing("benchmarks/run_all.sh memory")
    text = ""
    for model in report["results"]["models"].values():
        sizes = model["model"]
        rows = []
        for name, result in model["variants"].items():
            row = [name]
            for when in ("at_rest", "optimizer", "peak"):
                for source in ("measured", "predicted"):
                    value = result[source][when]
                    row.append(number(None if value is None else value / GIB, 2))
            row.append(number(result["peak_over_zero3_bytes_per_parameter"], 2))
            row.append(number(result["replica_bytes_per_parameter"], 2))
            rows.append(row)
        header = ["GiB per rank", "between steps", "predicted", "optimizer step", "predicted"]
        header += ["peak", "predicted", "over ZeRO-3, B/parameter", "predicted"]
        text += (
            f"{sizes['parameters'] / 1e9:.2f}e9 parameters ({sizes['layers']} layers, hidden "
            f"{sizes['hidden']}), micro-batch {model['micro_batch']}; messages of the largest unit "
            f"at most {model['largest_message_bytes'] / GIB:.2f} GiB:\n\n"
            f"{markdown(header, rows)}\n"
        )
    return text.rstrip("\n") + "\n" + sources([report])


def kernels(folder: Folder) -> str:
    """Share of the copy bandwidth that each kernel reaches, by size."""
    reports = folder.matching("kernels_*")
    if not reports:
        return missing("python benchmarks/kernels.py --out benchmarks/results/kernels_h200.json")
    text = ""
    for report in reports:
        results = report["results"]
        cases = results["cases"]
        sizes = sorted({case["size_mb"] for case in cases})
        shares: dict[str, dict[float, float]] = {}
        for case in cases:
            shares.setdefault(case["op"], {})[case["size_mb"]] = 100 * case["share_of_copy"]
        rows = [
            [op, *(number(of.get(size), 0, "%") for size in sizes)] for op, of in shares.items()
        ]
        text += f"A device-to-device copy moves {results['copy_gb_per_s']:.0f} GB/s.\n\n"
        text += markdown(["share of copy", *(f"{size:g} MB" for size in sizes)], rows)
        text += _floors(results, sizes[0])
        host = results.get("host_us_per_call", {}).values()
        if host:
            text += f"\nA call keeps the host busy for {min(host):.0f} to {max(host):.0f} us.\n"
        text += sources([report])
    return text


def _floors(results: dict[str, Any], size_mb: float) -> str:
    """Times of the smallest size beside those of kernels that do nothing, or next to it."""
    if "empty_launch_us" not in results:
        return ""
    times = [case["time_us"] for case in results["cases"] if case["size_mb"] == size_mb]
    return (
        f"\n{size_mb:g} MB takes {min(times):.1f} to {max(times):.1f} us, an empty launch "
        f"{results['empty_launch_us']:.1f} us, a kernel that reads and writes one cache line "
        f"{results['smallest_kernel_us']:.1f} us.\n"
    )


def lightning_step(folder: Folder) -> str:
    """Steps of the Trainer beside those of a plain loop, of every report."""
    reports = folder.matching("lightning_step_*")
    if not reports:
        return missing("benchmarks/nodes.sh ... benchmarks/lightning_step.py --json ...")
    rows = [
        [
            report["name"].removeprefix("lightning_step_").replace("_", " "),
            variant,
            number(times["loop_ms"]),
            number(times["trainer_ms"]),
        ]
        for report in reports
        for variant, times in report["results"]["variants"].items()
    ]
    header = ["report", "variant", "plain loop, ms", "Trainer, ms"]
    return markdown(header, rows) + sources(reports)


def ablation(folder: Folder) -> str:
    """Losses of what is sent; those of optimizer states are on the other page."""
    command = "python benchmarks/ablation.py --json benchmarks/results/ablation_NAME.json"
    return ablations(folder, lambda name: not name.startswith("AdamW "), command)


def update_error(folder: Folder) -> str:
    """What each way to send gradients and weights does to the update of Adam."""
    report = folder.report("update_error")
    if report is None:
        return missing(
            "python benchmarks/update_error.py --json benchmarks/results/update_error.json"
        )
    results = report["results"]
    setup = results["setup"]
    return (
        f"{setup['layers']} layers, hidden {setup['hidden']}, {results['nodes']} nodes, "
        f"{setup['steps']} steps from step {setup['warmup']} on:\n\n"
        + _update_rows("gradients between nodes", results["schemes"], 1)
        + "\n"
        + _update_rows("weights that gradients are of", results["weights"], 2)
        + sources([report])
    )


def _update_rows(label: str, schemes: dict[str, dict[str, float]], digits: int) -> str:
    rows = [
        [
            scheme,
            number(100 * row["error"], digits, "%"),
            number(100 * row["noise"], digits, "%"),
            f"{100 * (row['projection'] - 1):+.{digits}f}%",
            f"{100 * (row['second_moment'] - 1):+.{digits}f}%",
        ]
        for scheme, row in schemes.items()
    ]
    return markdown(
        [label, "error of the update", "of which noise", "its length", "second moment"], rows
    )


# Variants of the ablation and what they are called in the report of the update.
NOISY = {
    "qW": ("weights", "qW"),
    "qWD": ("weights", "qWD"),
    "SDP4Bit 2 bits": ("schemes", "nearest, 2 bits"),
    "SDP4Bit 3 bits": ("schemes", "nearest, 3 bits"),
    "SDP4Bit stochastic": ("schemes", "stochastic"),
    "SDP4Bit": ("schemes", "nearest"),
    "SDP4Bit feedback": ("schemes", "nearest, error feedback"),
    "SDP4Bit 6 bits": ("schemes", "nearest, 6 bits"),
}


def noise_cost(folder: Folder) -> str:
    """Noise in Adam's update beside the losses of runs with present code, most noise first."""
    reports = [folder.report(f"ablation_{name}") for name in ("gpt_125m_2x1", "tiny")]
    runs = [report for report in reports if report is not None]
    update = folder.report("update_error")
    if update is None or not runs:
        return missing("benchmarks/update_error.py and benchmarks/ablation.py")
    noise = {name: update["results"][of][scheme]["noise"] for name, (of, scheme) in NOISY.items()}
    rows = []
    for name in sorted(noise, key=lambda name: -noise[name]):
        row = [name, number(100 * noise[name], 1, "%"), number(100 * noise[name] ** 2, 2, "%")]
        for report in runs:
            outcomes = to_outcomes(report["results"], [BASELINE])
            after, during = (
                mean_percent(of(outcomes, name) if name in outcomes else [])
                for of in (changes, training_changes)
            )
            row.append(f"{after} ({during})")
        rows.append(row)
    tokens = [f"{report['results']['train_tokens'] / 1e6:.3g}" for report in runs]
    header = ["variant", "noise of the update", "its square"]
    return markdown([*header, *(f"loss after {n}M tokens (training)" for n in tokens)], rows) + (
        sources([update, *runs])
    )


def sensitivity(folder: Folder) -> str:
    """Losses where the gradients of some kinds of parameters alone are encoded."""
    report = folder.report("sensitivity")
    if report is None:
        return missing(
            "python benchmarks/sensitivity.py --json benchmarks/results/sensitivity.json ..."
        )
    results = report["results"]
    setup = results["setup"]
    tokens = setup["steps"] * setup["batch"] * setup["seq"] * results["nodes"]
    outcomes = to_outcomes(results, [BASELINE])
    return (
        f"{setup['layers']} layers, hidden {setup['hidden']}, {results['nodes']} nodes, "
        f"{setup['steps']} steps, {tokens / 1e6:.3g}M tokens:\n\n"
        + loss_table("gradients between nodes", outcomes)
        + sources([report])
    )


SECTIONS: dict[str, Callable[[Folder], str]] = {
    "step_time": step_time,
    "bytes_sent": bytes_sent,
    "exposed": exposed,
    "trace": trace,
    "compiled": compiled,
    "memory": memory,
    "kernels": kernels,
    "lightning_step": lightning_step,
    "ablation": ablation,
    "update_error": update_error,
    "noise_cost": noise_cost,
    "sensitivity": sensitivity,
}
