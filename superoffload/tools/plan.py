"""Runs `superoffload plan`: memory, time and settings for a model on a machine; exits with 0 only if something fits."""

from __future__ import annotations

import argparse
import math
import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from itertools import product
from typing import Any

from superoffload.errors import ArgumentError, shown
from superoffload.tools import estimate
from superoffload.tools.estimate import MOMENTS_BYTES, ModelShape, Settings, typical_shape
from superoffload.tools.machines import GB, GIB, MACHINES, Machine, find_machine
from superoffload.tools.output import add_option, check_writable, write_json

_SIZES = [digits * 10**power for power in range(6, 12) for digits in range(10, 100)]  # of models
_GIVEN = {"gpu_memory": "GiB", "host_memory": "GiB", "host_bandwidth": "GB/s"}
_OPTIONS = [one for one in fields(Settings) if one.metadata]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    brief = "whether a model fits a machine, and how fast it will train"
    about = "Predict memory and time of a training step, and find settings that fit. Nothing is measured."
    parser: argparse.ArgumentParser = subparsers.add_parser("plan", help=brief, description=about)
    parser.add_argument("--model", help="7B or so, a config.json or its folder; without it, how large it may be")
    parser.add_argument("--hardware", metavar="NAME", help=f"{', '.join(MACHINES)} (default: this machine)")
    for name, unit in _GIVEN.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=unit, help="per GPU, as you know it")
    for one in _OPTIONS:
        add_option(parser, f"--{one.name.replace('_', '-')}", default=one.default, **one.metadata)
    parser.add_argument("--json", metavar="PATH", help="write everything to this file too")
    parser.set_defaults(stray="--model")  # what a word without an option is likely to be
    return parser


def run(args: argparse.Namespace) -> int:
    check_writable(args.json, "json")
    asked = Settings(**{one.name: getattr(args, one.name) for one in _OPTIONS})
    machine = find_machine(args.hardware, asked.ranks)
    given: dict[str, Any] = {name: in_bytes(name, text) for name in _GIVEN if (text := getattr(args, name)) is not None}
    machine = replace(machine, **given)
    report = largest(machine, asked) if args.model is None else plan(estimate.find_model(args.model), machine, asked)
    print("\n".join(report["lines"]))
    write_json(args.json, {"command": "plan", "machine": asdict(machine), **report})
    return 0 if report["passed"] else 1


def in_bytes(name: str, text: str) -> float:
    """Reads a number with or without a unit."""
    unit = _GIVEN[name]
    also, hint = ("|GB", ", or with its unit, such as 128GB") if unit == "GiB" else ("", "")
    found = re.fullmatch(rf"(\d*\.?\d+) *({unit}{also})?", text, re.IGNORECASE)
    if not found or not 0 < float(found[1]) < math.inf:
        raise ArgumentError(f"{name}={shown(text)}: expected {unit}, a number above 0{hint}")
    return float(found[1]) * (GIB if (found[2] or unit).upper() == "GIB" else GB)


def evaluate(model: ModelShape, machine: Machine, settings: Settings) -> dict[str, Any]:
    """Returns whether the settings fit, and tables of memory in GiB and time in seconds."""
    memory = estimate.estimate_memory(model, settings, has_gpu=machine.gpu_memory > 0)
    tables: dict[str, dict[str, float]] = {}
    for name, need, room in zip(("GPU", "host"), memory, estimate.rooms(machine, settings), strict=True):
        sizes = {**need, "all of it": sum(need.values()), "usable": room} if need else {}
        tables[f"{name} memory per rank, GiB"] = {part: size / GIB for part, size in sizes.items()}
    fits = all(table["all of it"] <= table["usable"] for table in tables.values() if table)
    if seconds := estimate.estimate_step(model, machine, settings):
        step = sum(seconds.values()) - seconds["optimizer, hidden"]
        tables["time, predicted, seconds"] = {**seconds, "step": step}
    return {"fits": fits, "settings": asdict(settings), "tables": tables}


def leaner(asked: Settings, *, has_gpu: bool) -> Iterator[Settings]:
    """Yields what was asked, and then what needs less memory, from what changes training least on."""
    moments = list(MOMENTS_BYTES)[list(MOMENTS_BYTES).index(asked.state_dtype) :]
    micros = [asked.micro_batch >> n for n in range(24) if asked.micro_batch % (1 << n) == 0]
    split = "split" if has_gpu else asked.master_dtype  # in place it saves nothing
    masters, recomputing = {asked.master_dtype: 0, split: 0}, {asked.checkpointing: 0, "full": 0}
    for moment, master, micro, on_host, checkpointing in product(moments, masters, micros, (False, True), recomputing):
        accumulation = asked.accumulation * asked.micro_batch // micro
        lean = replace(asked, state_dtype=moment, master_dtype=master, checkpointing=checkpointing)
        lean = replace(lean, micro_batch=micro, accumulation=accumulation)
        if not on_host:
            yield lean
        elif has_gpu and asked.ranks == 1 and accumulation > 1:  # FSDP2's gradients always add up on the GPU
            yield replace(lean, gradient_dtype="fp32", sums_on_host=True)


def first_that_fits(model: ModelShape, machine: Machine, asked: Settings) -> Settings | None:
    variants = leaner(asked, has_gpu=machine.gpu_memory > 0)
    return next((one for one in variants if evaluate(model, machine, one)["fits"]), None)


def changes(asked: Settings, found: Settings) -> str:
    words = {
        "checkpointing": "activation checkpointing",
        "micro_batch": f"{found.accumulation} micro-batches of {found.micro_batch}",
        "sums_on_host": "gradients that add up in host memory",
        "master_dtype": "split masters",
        "state_dtype": f"{found.state_dtype.replace('8bit', '8-bit')} moments",
    }
    differ = [text for name, text in words.items() if getattr(found, name) != getattr(asked, name)]
    return ", ".join(differ) or "the settings as asked"


def plan(model: ModelShape, machine: Machine, asked: Settings) -> dict[str, Any]:
    """Reports on one model: what was asked, and what fits if that does not."""
    found = first_that_fits(model, machine, asked)
    columns = [evaluate(model, machine, settings) for settings in dict.fromkeys((asked, found or asked))]
    torch_bytes = estimate.torch_on_gpu_bytes(model, asked)
    code = code_for(found, has_gpu=machine.gpu_memory > 0) if found else []
    size = f"{model.parameters / 1e9:.2f}B parameters ({model.layers} layers of {model.hidden})"
    lines = [f"{size}, {about(machine, asked)}", *table_lines([column["tables"] for column in columns])]
    if found:
        how = f"with {changes(asked, found)}, not as asked" if found != asked else "as asked"
        lines += [f"It fits {how}. To paste:", *(f"    {line}" for line in code)]
    else:
        lines += ["It does not fit, with no settings of this planner.", *remedies(model, machine, asked)]
    if machine.gpu_memory:
        verdict = "fits" if torch_bytes <= estimate.rooms(machine, asked)[0] else "does not fit"
        alone = "torch.optim.AdamW on the GPU, with fp32 masters and these activations"
        lines.append(f"{alone}, would need {torch_bytes / GIB:.1f} GiB: {verdict}.")
    others = "CUDA, its allocator's gaps, the system" if machine.gpu_memory else "the system"
    lines.append(f"usable: without what {others} and Python take (assumptions).")
    results = {"passed": found is not None, "asked": columns[0], "found": columns[-1] if found else None}
    sizes = {"parameters": model.parameters, "torch_gpu_gib": torch_bytes / GIB}
    return {**results, **sizes, "code": "\n".join(code), "lines": lines}


def about(machine: Machine, settings: Settings) -> str:
    gpu = f"{machine.gpu_memory / GIB:.1f} GiB on the GPU, " if machine.gpu_memory else ""
    nodes = "\nTime counts them as one node." if settings.ranks > machine.gpus_per_node else ""
    return f"on {settings.ranks} x {machine.name} ({gpu}{machine.host_memory / GIB:.1f} GiB of host memory each){nodes}"


def table_lines(columns: list[dict[str, dict[str, float]]]) -> list[str]:
    lines = []
    for title in (title for title, table in columns[0].items() if table):
        lines += ["", f"{title:<28}" + "".join(f"{name:>12}" for name in ("as asked", "leaner")[: len(columns)])]
        digits = 3 if title.startswith("time") else 1
        for part in dict.fromkeys(part for column in columns for part in column[title]):
            values = [column[title].get(part, 0.0) for column in columns]
            lines.append(f"  {part:<26}" + "".join(f"{value:>12.{digits}f}" for value in values))
    return [*lines, ""]


def remedies(model: ModelShape, machine: Machine, asked: Settings) -> list[str]:
    """Says how much host memory, how large a GPU, or how many ranks would do."""
    roomy, lines = replace(machine, host_memory=math.inf), []
    lean = replace(asked, master_dtype="split") if machine.gpu_memory else asked
    for variant in (asked, lean, replace(lean, state_dtype="8bit")):
        wanted = variant if machine.gpu_memory else replace(variant, checkpointing="full")
        if found := first_that_fits(model, roomy, wanted):
            need = evaluate(model, roomy, found)["tables"]["host memory per rank, GiB"]["all of it"]
            reserve = estimate.HOST_RESERVE / min(asked.ranks, machine.gpus_per_node) / GIB
            memory = math.ceil(min(need + reserve, need / (1 - estimate.HOST_RESERVE_SHARE)))
            lines.append(f"  --host-memory {memory} would do, with {changes(asked, found)}")
    if not lines:
        *_, leanest = leaner(asked, has_gpu=True)
        need = evaluate(model, roomy, leanest)["tables"]["GPU memory per rank, GiB"]["all of it"]
        memory = math.ceil((need + estimate.CONTEXT_BYTES / GIB) / (1 - estimate.FRAGMENTATION))
        lines.append(f"  Even with {changes(asked, leanest)} it needs a GPU of {memory} GiB; or shorten --sequence.")
    for ranks in (asked.ranks << power for power in range(1, 11)):
        if found := first_that_fits(model, machine, replace(asked, ranks=ranks)):
            lines.append(f"  --ranks {ranks} would do, with {changes(asked, found)}")
            break
    return list(dict.fromkeys(lines))


def code_for(settings: Settings, *, has_gpu: bool = True) -> list[str]:
    """Returns Python for a model of Hugging Face's on its device."""
    lines = ["import superoffload, torch", "model.to(torch.bfloat16)  # the optimizer has the masters"]
    if settings.checkpointing == "full":
        lines.append("model.gradient_checkpointing_enable()  # of transformers; else torch.utils.checkpoint")
    if settings.ranks > 1:
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
        lines.append('# first: init_process_group("nccl"); for a model larger than one GPU see docs/ranks.md')
        lines.append("policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
        lines += ["for module in (*model.model.layers, model):", "    fully_shard(module, mp_policy=policy)"]
    kept = {"master_dtype": settings.master_dtype, "state_dtype": settings.state_dtype}
    dtypes = [f'{name}="{value}"' for name, value in kept.items() if value != "fp32"]
    dtypes += ['accumulate_dtype="fp32"'] if settings.gradient_dtype == "fp32" else []
    arguments = ["model.parameters()", "lr=1e-5"]
    if not has_gpu and settings.ranks == 1 and dtypes in ([], ['state_dtype="bf16"']):
        lines.append(f"optimizer = superoffload.CPUAdamW({', '.join(arguments + dtypes)})")
        return [*lines, "# before optimizer.step(): torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]
    arguments += ["max_grad_norm=1.0", *dtypes, *(["model=model"] if settings.ranks > 1 else [])]
    arguments += [] if has_gpu else ['speculation="never"']  # nothing can hide there: no journal, no copies
    lines.append(f"optimizer = superoffload.AdamW({', '.join(arguments)})")
    if settings.accumulation > 1:
        around = f"all of the {settings.accumulation} backward() but the last"
        lines.append(f"# `with optimizer.accumulate():` around {around}")
    return lines


def largest(machine: Machine, asked: Settings) -> dict[str, Any]:
    """Reports the largest models of a usual shape that fit, from what was asked to the leanest settings."""
    recomputing = replace(asked, checkpointing="full")
    split = replace(recomputing, master_dtype="split") if machine.gpu_memory else recomputing
    lines, sizes = [f"The largest models of a usual shape that fit, {about(machine, asked)}:"], []
    for settings in dict.fromkeys((asked, recomputing, split, replace(split, state_dtype="8bit"))):
        fitting = bisect(_SIZES, False, key=lambda size: not evaluate(typical_shape(size), machine, settings)["fits"])
        sizes.append(_SIZES[fitting - 1] / 1e9 if fitting else 0.0)
        lines.append(f"  {sizes[-1]:>8.3g}B with {changes(asked, settings)}")
    lines.append(f"For one in full, with code to paste, add --model, such as --model {sizes[-1]:g}B")
    return {"passed": sizes[-1] > 0, "largest_billions": sizes, "lines": lines}
