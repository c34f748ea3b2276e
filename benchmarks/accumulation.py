"""Measures how far a sum of micro-batches' gradients, added up in bf16 and in fp32, is from their exact sum.

    python -m benchmarks.accumulation

It fits a linear layer in bf16 to the identity. The exact sum adds the same bf16 gradients of autograd in fp64; the
error is the norm of the difference, relative to the norm of the exact sum.
"""

from __future__ import annotations

import torch

from superoffload import AdamW

COUNTS = (4, 256)
WIDTH = 256


def error_of_sum(micro_batches: int, accumulate_dtype: str | None) -> float:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    weight = torch.nn.Parameter(values.to(torch.bfloat16))
    exact = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    with AdamW([weight], accumulate_dtype=accumulate_dtype) as optimizer:
        for _ in range(micro_batches):
            x = torch.randn(64, WIDTH, generator=generator).to(torch.bfloat16)
            loss = (x @ weight - x).float().square().mean() / micro_batches
            exact += torch.autograd.grad(loss, weight, retain_graph=True)[0].double()
            with optimizer.accumulate():
                loss.backward()
        assert weight.grad is not None
        return float((weight.grad.double() - exact).norm() / exact.norm())


def table() -> list[str]:
    """Returns the table of docs/edits.md."""
    lines = ["| micro-batches | in bf16 | in fp32 |", "|--:|--:|--:|"]
    for count in COUNTS:
        lines.append(f"| {count} | {error_of_sum(count, None):.0e} | {error_of_sum(count, 'fp32'):.0e} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
