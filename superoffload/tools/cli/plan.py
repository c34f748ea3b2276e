"""Runs `superoffload plan`: memory, step time and settings for a model on a machine; exits with 0 only if it fits."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superoffload.errors import ArgumentError
from superoffload.tools.output import add_option

if TYPE_CHECKING:
    from superoffload.tools.plan.memory_estimate import Settings
    from superoffload.tools.plan.models import ModelShape


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    from superoffload.tools.plan.memory_estimate import CHECKPOINTING, ENGINES, SHARDINGS
    from superoffload.tools.plan.profiles import PROFILES

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="whether a model fits a machine, and how fast it will train",
        description="Predict memory by component, what binds, the step time with what is hidden and exposed, and\n"
        "recommend settings. Nothing is measured; every assumption and every source is printed.\n"
        "Exits with 0 only if the model fits with the settings given.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model: --model, or its sizes")
    model.add_argument("--model", metavar="SIZE_OR_PATH", help="such as 7B, or a Hugging Face config.json")
    for name in ("layers", "hidden", "heads", "kv-heads", "ffn"):
        model.add_argument(f"--{name}", type=int)
    add_option(model, "--vocabulary", type=int, default=128_000, help="of a model given by its sizes")
    machine = parser.add_argument_group("machine")
    add_option(
        machine,
        "--hardware",
        default="gh200-96",
        metavar="NAME_OR_PATH",
        help=f"a built-in profile ({', '.join(PROFILES)}), or a file of superoffload doctor --json",
    )
    machine.add_argument("--gpu", metavar="NAME", help="with a file: the profile for what doctor did not measure")
    machine.add_argument(
        "--host-bandwidth",
        type=float,
        metavar="GB_PER_SECOND",
        help="of the processors' memory, per GPU, as you know it",
    )
    add_option(machine, "--ranks", type=int, default=1, help="one per GPU")
    run = parser.add_argument_group("settings")
    add_option(run, "--engine", choices=ENGINES, default="superoffload", help="what steps the optimizer")
    run.add_argument(
        "--sharding",
        choices=SHARDINGS,
        help="(default: none for one rank, fsdp2 for several; zero3 for DeepSpeed's engines)",
    )
    add_option(run, "--sequence", type=int, default=2048, help="tokens per sequence")
    add_option(run, "--micro-batch", type=int, default=1, help="sequences per rank at once")
    add_option(run, "--accumulation", type=int, default=1, help="micro-batches per step")
    add_option(run, "--checkpointing", choices=CHECKPOINTING, default="none", help="of activations")
    add_option(run, "--gpu-fraction", type=float, default=0.0, help="of the state that placement= keeps on the GPU")
    add_option(run, "--clip-rate", type=float, default=0.0, help="share of the steps that clip")
    add_option(run, "--utilization", type=float, default=0.4, help="of the GPU's peak in forward and backward")
    add_option(
        run, "--state-dtype", choices=("fp32", "bf16", "8bit"), default="fp32", help="of the moments (superoffload)"
    )
    add_option(run, "--master-dtype", choices=("fp32", "split"), default="fp32", help="of the masters (superoffload)")
    add_option(
        run, "--gradient-dtype", choices=("bf16", "fp32"), default="bf16",
        help="of the gradients; fp32 is accumulate_dtype='fp32' (superoffload in one process, or under FSDP2)",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="PATH", help="write everything to this file too")
    output.add_argument("--all", action="store_true", help="list every engine, sharding and checkpointing too")
    output.add_argument("--plots", metavar="FOLDER", help="draw throughput.png and memory.png there")
    return parser


def run(args: argparse.Namespace) -> int:
    from superoffload.tools.output import check_writable, write_json
    from superoffload.tools.plan.hardware import find_hardware
    from superoffload.tools.plan.machines import GB
    from superoffload.tools.plan.plan_report import comparison_table, plan_as_json, plan_as_text
    from superoffload.tools.plan.settings import all_choices, evaluate

    model, settings = model_from(args), settings_from(args)
    given = None if args.host_bandwidth is None else args.host_bandwidth * GB
    hardware = find_hardware(args.hardware, args.gpu, given)
    check_writable(args.json, "json")
    if args.plots:
        _draw(Path(args.plots), model, hardware, settings)
    print(plan_as_text(model, hardware, settings))
    if args.all:
        print("\n".join(["", *comparison_table(all_choices(model, hardware, settings))]))
    if args.json:
        write_json(args.json, plan_as_json(model, hardware, settings))
    return 0 if evaluate(model, hardware, settings).fit.fits else 1


def model_from(args: argparse.Namespace) -> ModelShape:
    from superoffload.tools.plan.models import (
        ModelShape,
        parse_parameter_count,
        read_config,
        swiglu_width,
        typical_shape,
    )

    if args.model is not None:
        if args.layers or args.hidden:
            raise ArgumentError(f"model={args.model} together with layers or hidden: give either the one or the others")
        if args.model.endswith(".json") or os.path.exists(args.model):
            return read_config(args.model)
        return typical_shape(parse_parameter_count(args.model))
    if not (args.layers and args.hidden and args.heads):
        raise ArgumentError("no model given: pass --model 7B, --model config.json, or --layers, --hidden and --heads")
    ffn = args.ffn or swiglu_width(args.hidden)
    return ModelShape(args.layers, args.hidden, args.heads, args.kv_heads or args.heads, ffn, args.vocabulary)


def settings_from(args: argparse.Namespace) -> Settings:
    from superoffload.tools.plan.memory_estimate import Settings

    sharding = args.sharding
    if sharding is None:
        needs_zero3 = args.engine in ("zero-offload", "deepspeed-superoffload")
        sharding = "zero3" if needs_zero3 else "fsdp2" if args.ranks > 1 else "none"
    names = (
        "engine", "ranks", "sequence", "micro_batch", "accumulation", "checkpointing", "gpu_fraction", "clip_rate",
        "utilization", "state_dtype", "master_dtype", "gradient_dtype",
    )  # fmt: skip
    return Settings(sharding=sharding, **{name: getattr(args, name) for name in names})


def _draw(folder: Path, model: ModelShape, hardware: Any, settings: Settings) -> None:
    from benchmarks.plots import PLOT_HINT, matplotlib_installed
    from superoffload.tools.output import naming_write_errors
    from superoffload.tools.plan.plan_plots import plot_memory, plot_throughput

    if not matplotlib_installed():
        raise ArgumentError(f"plots={folder}: {PLOT_HINT}")
    with naming_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        plot_throughput(model, hardware, settings, folder / "throughput.png")
        plot_memory(hardware, settings, folder / "memory.png")
