"""Defines the options that `train` and `verify` share, and the configuration they make."""

from __future__ import annotations

import argparse
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.train.training_config import DTYPE_NAMES, MASTER_DTYPES, STATE_DTYPES, TrainingConfig

MEBIBYTE = 1 << 20


def add_option(group: argparse._ActionsContainer, flag: str, *, help: str, **settings: Any) -> None:
    """Adds an argument whose help tells its default, if it has one."""
    default = settings.get("default")
    group.add_argument(flag, help=help if default is None else f"{help} (default: {default})", **settings)


def add_shared_options(parser: argparse.ArgumentParser, defaults: TrainingConfig, out: str) -> None:
    """Adds everything but `--speculation` and evaluation, with `defaults` shown in the help."""
    _add_model_options(parser, defaults)
    _add_data_options(parser)
    _add_training_options(parser, defaults)
    _add_machine_options(parser, defaults)
    group = parser.add_argument_group("output")
    add_option(
        group, "--out", metavar="RUN_DIR", default=out, help="run folder; results of an earlier run are replaced"
    )
    group.add_argument("--json", metavar="PATH", help="write the summary to this file too (default: run folder only)")
    group.add_argument("--quiet", action="store_true", help="no progress, only the result")


def _add_model_options(parser: argparse.ArgumentParser, defaults: TrainingConfig) -> None:
    group = parser.add_argument_group("model")
    model = defaults.model
    add_option(group, "--layers", type=int, default=model.layers, help="transformer blocks")
    add_option(group, "--hidden", type=int, default=model.hidden, help="width of the residual stream")
    add_option(group, "--heads", type=int, default=model.heads, help="query heads")
    add_option(group, "--kv-heads", type=int, default=model.kv_heads, help="key and value heads")
    add_option(group, "--mlp", type=int, default=model.mlp, help="inner width of the feed-forward layers")
    add_option(
        group,
        "--state-dtype",
        choices=STATE_DTYPES,
        default=defaults.state_dtype,
        help="exp_avg and exp_avg_sq; bf16 and 8bit are rounded stochastically",
    )
    add_option(
        group,
        "--master-dtype",
        choices=MASTER_DTYPES,
        default=defaults.master_dtype,
        help="split: the bf16 parameter and 16 bits more have the bits of an fp32 master",
    )
    group.add_argument("--tied", action="store_true", help="one matrix for the embedding and the output head")
    add_option(group, "--dtype", choices=DTYPE_NAMES, default=defaults.dtype, help="parameters and gradients")
    add_option(
        group,
        "--compute",
        choices=("auto", *DTYPE_NAMES),
        default=defaults.compute,
        help="activations; auto is --dtype, except on a CPU without bf16 arithmetic: there fp32",
    )


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument(
        "--data", nargs="+", metavar="PATH", help="files or folders of text (default: the Python standard library)"
    )
    add_option(group, "--max-corpus-mib", type=float, default=8, help="read at most this much text")


def _add_training_options(parser: argparse.ArgumentParser, defaults: TrainingConfig) -> None:
    group = parser.add_argument_group("training")
    add_option(group, "--steps", type=int, default=defaults.steps, help="optimizer steps")
    add_option(group, "--batch", type=int, default=defaults.batch, help="windows per micro-batch")
    add_option(group, "--sequence", type=int, default=defaults.model.sequence, help="bytes per window")
    add_option(group, "--accumulation", type=int, default=defaults.accumulation, help="micro-batches per step")
    add_option(group, "--lr", type=float, default=defaults.lr, help="peak learning rate")
    group.add_argument("--warmup", type=int, help="warm-up steps (default: a tenth of the steps, 20 at most)")
    add_option(group, "--weight-decay", type=float, default=defaults.weight_decay, help="of matrices; norms have none")
    add_option(
        group,
        "--max-grad-norm",
        type=threshold,
        default=defaults.max_grad_norm,
        help="clip the gradient norm; or none",
    )
    add_option(group, "--seed", type=int, default=defaults.seed, help="of the weights and of the batches")


def _add_machine_options(parser: argparse.ArgumentParser, defaults: TrainingConfig) -> None:
    group = parser.add_argument_group("machine")
    add_option(group, "--device", default="cpu", help="cpu is the only one for this command")
    add_option(group, "--bucket-numel", type=int, default=defaults.bucket_numel, help="parameters per bucket")
    group.add_argument("--threads", type=int, help="worker threads of the optimizer (default: its own choice)")
    group.add_argument("--torch-threads", type=int, help="threads of torch itself (default: torch's choice)")


def threshold(text: str) -> float | None:
    """Reads --max-grad-norm; argparse names this function in its error message."""
    return None if text == "none" else float(text)


def config_from(args: argparse.Namespace, defaults: TrainingConfig) -> TrainingConfig:
    """Returns the checked configuration; raises ArgumentError for impossible values."""
    if args.device != "cpu":
        raise ArgumentError(
            f"device={args.device}: expected cpu, the one device that this command trains on; superoffload.AdamW takes "
            f"parameters on a GPU in a training loop of your own"
        )
    model = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "kv_heads", "mlp", "sequence", "tied")}
    shared = (
        "dtype", "compute", "steps", "batch", "accumulation", "lr", "warmup", "weight_decay", "max_grad_norm", "seed",
        "bucket_numel", "threads", "torch_threads", "state_dtype", "master_dtype",
    )  # fmt: skip
    own = [name for name in ("speculation", "eval_every") if hasattr(args, name)]
    values = {name: getattr(args, name) for name in (*shared, *own)}
    return defaults.replace(model=type(defaults.model)(**model), **values)


def corpus_limit(args: argparse.Namespace) -> int:
    if not 0 < args.max_corpus_mib <= 1 << 20:
        raise ArgumentError(f"max_corpus_mib={args.max_corpus_mib:g}: expected a positive number of MiB of text")
    return max(1, int(args.max_corpus_mib * MEBIBYTE))
