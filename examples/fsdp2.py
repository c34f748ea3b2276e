"""FSDP2 with torchrun: fully_shard, bf16 compute with fp32 reduction, checkpoints that any number of ranks loads.

Runs on GPUs, or on processors where there is none.

torchrun --nproc-per-node 2 examples/fsdp2.py --text some.txt --out runs/fsdp2
torchrun --nproc-per-node 4 examples/fsdp2.py --text some.txt --out runs/fsdp2 --resume
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from plain import LanguageModel, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import superoffload
from superoffload import checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--out", default="runs/fsdp2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-steps", type=int, default=15)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    torch.manual_seed(1)
    model = LanguageModel(width=64, layers=2).bfloat16().to(kind)
    mesh = init_device_mesh(kind, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = superoffload.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0, model=model)
    first = 0
    if args.resume:
        folder = checkpoints.latest(args.out)
        assert folder is not None, f"no checkpoint in {args.out}"
        first = checkpoints.load(folder, model, optimizer)["step"]
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss = model(batch(text, world * step + rank, rows=8).to(kind))
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step} loss {loss.item():.4f} norm {optimizer.grad_norm:.3f}", flush=True)
        if (step + 1) % args.save_steps == 0:
            checkpoints.save(f"{args.out}/step-{step + 1}", model, optimizer, extra={"step": step + 1}, keep=2)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
