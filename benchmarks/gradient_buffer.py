"""Error of 8-bit gradient accumulation: which code keeps the sum over micro-batches closest.

After each micro-batch the stored sum is decoded, the new gradient is added in fp32 and the result
is encoded again, as in AGoQ (§5). Reported is the relative L2 error against the fp32 sum after 1,
4, 16 and 64 micro-batches: ``stored``, and ``delivered``, where the last sum goes to the reduction
without being encoded once more.

    python benchmarks/gradient_buffer.py --json gradient_buffer.json

Data: ``gpt`` are gradients of a small GPT on the standard library of the running Python as bytes,
after some training; ``gaussian`` are independent samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import argument_parser, choices, table, write_report
from corpus import standard_library
from gpt import GPT, GPTConfig
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, derive_seed, encode

CHECKPOINTS = (1, 4, 16, 64)
Quantizer = Callable[[Tensor, int], Tensor]  # fp32 vector and seed to the vector read back


def through_codec(code: str, group_size: int, x: Tensor, seed: int, **options: Any) -> Tensor:
    """Encode and decode with a codec, by default with bf16 scales."""
    options = {"scale_dtype": "bfloat16"} | options
    spec = CodecSpec(code=code, group_size=group_size, **options)  # type: ignore[arg-type]
    return decode(spec, encode(spec, x.view(1, -1), seed=seed), x.numel()).view(-1)


SCHEMES: dict[str, Quantizer] = {
    "fp8-e4m3-g128": partial(through_codec, "fp8_e4m3", 128),
    **{f"int8-g{size}": partial(through_codec, "int8", size) for size in (16, 32, 64, 128)},
    "int8-g16-stochastic": partial(through_codec, "int8", 16, rounding="stochastic"),
    "int8-g128-hadamard128": partial(through_codec, "int8", 128, hadamard_size=128),
    "int8-g32-fp32-scales": partial(through_codec, "int8", 32, scale_dtype="float32"),
    "bfloat16": lambda x, seed: x.bfloat16().float(),
}


def gaussian(numel: int) -> Iterator[list[Tensor]]:
    """Yield ``[numel]`` gradients of micro-batches without end."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield [torch.randn(numel, generator=generator)]


def gpt_training() -> Iterator[tuple[GPT, torch.optim.Optimizer]]:
    """Yield a small GPT with the gradients of one batch after another, and its optimizer."""
    config = GPTConfig(layers=3, hidden=192, heads=6, seq=128, vocab=264)
    torch.manual_seed(0)
    model = GPT(config)
    model.reset_local_shards(0)
    blocks = torch.from_numpy(standard_library(config.seq - 1).train.astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows in torch.randperm(len(blocks)).split(4):
        optimizer.zero_grad()
        model(blocks[rows]).backward()
        yield model, optimizer


def gpt_gradients(train_steps: int) -> Iterator[list[Tensor]]:
    """Train a small GPT, then yield the gradients of micro-batches at its final weights."""
    for step, (model, optimizer) in enumerate(gpt_training()):
        if step < train_steps:
            optimizer.step()
        else:
            yield [p.grad.flatten() for p in model.parameters() if p.ndim > 1]  # type: ignore[union-attr]


def measure(source: Iterator[list[Tensor]], names: list[str]) -> dict[str, dict[str, list[float]]]:
    """Accumulate gradients with every scheme side by side."""
    errors: dict[str, dict[str, list[float]]] = {n: {"stored": [], "delivered": []} for n in names}
    exact, sums = [], {}
    for step in range(1, max(CHECKPOINTS) + 1):
        gradients = next(source)
        if not exact:
            exact = [torch.zeros_like(g, dtype=torch.float64) for g in gradients]
            sums = {name: [torch.zeros_like(g) for g in gradients] for name in names}
        torch._foreach_add_(exact, [g.double() for g in gradients])
        for index, name in enumerate(names):
            added = torch._foreach_add(sums[name], gradients)
            sums[name] = [
                SCHEMES[name](x, derive_seed(index, step, i)) for i, x in enumerate(added)
            ]
            if step in CHECKPOINTS:
                errors[name]["stored"].append(_distance(sums[name], exact))
                errors[name]["delivered"].append(_distance(list(added), exact))
    return errors


def _distance(found: list[Tensor], exact: list[Tensor]) -> float:
    parts = [torch.cat([x.double() for x in tensors]) for tensors in (found, exact)]
    return float((parts[0] - parts[1]).norm() / parts[1].norm())


def main() -> None:
    """Measure, print one table per kind of data, write JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--schemes", default=",".join(SCHEMES), help=", ".join(SCHEMES))
    parser.add_argument("--data", default="gpt,gaussian")
    parser.add_argument("--numel", type=int, default=1 << 16, help="elements of Gaussian data")
    parser.add_argument("--train-steps", type=int, default=150, help="before gradients are taken")
    args = parser.parse_args()
    names = choices(parser, "schemes", args.schemes, SCHEMES)
    sources = {"gpt": gpt_gradients(args.train_steps), "gaussian": gaussian(args.numel)}
    errors = {}
    for kind in choices(parser, "data", args.data, sources):
        errors[kind] = measure(sources[kind], names)
        rows = [
            [name, *(f"{100 * e:.2f}" for e in (*found["stored"], found["delivered"][2]))]
            for name, found in errors[kind].items()
        ]
        header = ["scheme", *(f"{n} mb, %" for n in CHECKPOINTS), "16 delivered"]
        print(f"\n{kind}\n{table(rows, header)}", flush=True)
    write_report(args.json, "gradient_buffer", {"microbatches": CHECKPOINTS, "errors": errors})


if __name__ == "__main__":
    main()
