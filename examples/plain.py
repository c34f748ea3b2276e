"""A plain PyTorch loop: a byte-level language model, checkpoints in the background, resume.

python examples/plain.py --text some.txt --out runs/plain
python examples/plain.py --text some.txt --out runs/plain --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import superoffload
from superoffload import checkpoints


class LanguageModel(nn.Module):
    """A transformer over bytes."""

    def __init__(self, width: int = 128, layers: int = 3, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x, targets = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=self.head.weight.dtype)
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        loss: Tensor = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss


def batch(text: Tensor, step: int, rows: int = 16, length: int = 65) -> Tensor:
    """Depends on the step alone, so that a resumed run sees what the first one would have seen."""
    starts = torch.randint(0, len(text) - length, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--out", default="runs/plain")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(1)
    model = LanguageModel().bfloat16()
    optimizer = superoffload.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0, model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    first = 0
    folder = checkpoints.latest(args.out)
    if args.resume != (folder is not None):
        parser.error(f"--out {args.out}: " + (f"has {folder}; add --resume" if folder else "no checkpoint to resume"))
    if folder is not None:
        extra = checkpoints.load(folder, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["step"]
    saving = None
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss = model(batch(text, step))
        loss.backward()  # the optimizer steps meanwhile
        optimizer.step()
        scheduler.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step} loss {loss.item():.4f} norm {optimizer.grad_norm:.3f}", flush=True)
        if (step + 1) % args.save_steps == 0:
            extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
            name = f"{args.out}/step-{step + 1}"
            saving = checkpoints.save_in_background(name, model, optimizer, extra=extra, keep=2)
    if saving is not None:
        saving.wait()
    stats = optimizer.stats()
    print(f"clipped {stats['clip_rate']:.0%} of the steps; masters {optimizer.state_digests()['master'][:16]}")
    optimizer.close()


if __name__ == "__main__":
    main()
