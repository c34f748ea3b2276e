"""Reads DeepSpeed's JSON: whether it selects us, our options in it, and the form that DeepSpeed's checks accept."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from superoffload.engine.bucket import ELEMENT_TYPES, GroupHyper
from superoffload.engine.schedule import MODES
from superoffload.errors import ArgumentError
from superoffload.host.numbers import check_number, check_threads, check_whole_number
from superoffload.optimizer.arguments import check_hyper_parameters, check_rank_check, check_seed

DEVICE = "superoffload"
OPTIONS_KEY = "superoffload"
DELIVERIES = ("eager", "on_demand")
OPTIMIZERS = ("adam", "adamw")
STATE_DTYPES = ("fp32", "bf16", "8bit")
MASTER_DTYPES = ("fp32", "split")
LEANER_MASTERS = 'masters have fp32 values here; for less memory set "superoffload": {"master_dtype": "split"}'
ELASTIC = "DeepSpeed cannot load such checkpoints with Adam in host memory; use universal checkpoints"
LEANER_MOMENTS = 'set "superoffload": {"state_dtype": "bf16"} instead'


@dataclass(frozen=True)
class Options:
    """Holds the top-level ``"superoffload": {...}``.

    ``match_stock`` follows DeepSpeed's own verdicts, skips, loss scales and clip formula to the bit, also where ours
    are better (docs/deepspeed.md).
    """

    speculation: str = "adaptive"
    delivery: str = "eager"
    bucket_numel: int | None = None
    threads: int | None = None
    match_stock: bool = False
    rank_check: Any = "light"
    rank_timeout: float | None = None
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("speculation", self.speculation, MODES)
        _one_of("delivery", self.delivery, DELIVERIES)
        check_whole_number(f'"{OPTIONS_KEY}": bucket_numel', self.bucket_numel)
        check_threads(f'"{OPTIONS_KEY}": threads', self.threads)
        if not isinstance(self.match_stock, bool):
            raise ArgumentError(f'"{OPTIONS_KEY}": match_stock={self.match_stock!r}: expected true or false')
        check_rank_check(self.rank_check)
        _one_of("state_dtype", self.state_dtype, STATE_DTYPES)
        _one_of("master_dtype", self.master_dtype, MASTER_DTYPES)
        check_seed(self.seed)
        if self.rank_timeout is not None:
            check_number(f'"{OPTIONS_KEY}": rank_timeout', self.rank_timeout, low=0.1)


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ArgumentError(f'"{OPTIONS_KEY}": {name}={value!r}: expected one of {", ".join(map(repr, known))}')


def read_options(config: Mapping[str, Any]) -> Options:
    """Reads our options; refuses unknown ones, which would otherwise be silently ignored."""
    given = config.get(OPTIONS_KEY, {})
    if not isinstance(given, Mapping):
        raise ArgumentError(f'"{OPTIONS_KEY}": {given!r}: expected an object such as {{"speculation": "adaptive"}}')
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(map(str, given)) - set(known))
    if unknown:
        raise ArgumentError(f'"{OPTIONS_KEY}": unknown {", ".join(unknown)}; expected some of {", ".join(known)}')
    return Options(**given)


def load(config: Any) -> dict[str, Any] | None:
    """Loads a config that ``DeepSpeedConfig`` accepts as a dictionary; None if only DeepSpeed can read it."""
    if isinstance(config, dict):
        return config
    if not isinstance(config, str | os.PathLike):
        return None
    if os.path.exists(config):
        with open(config, encoding="utf-8") as file:
            return _parse(file.read())
    try:
        return _parse(base64.urlsafe_b64decode(str(config)).decode("utf-8"))
    except (UnicodeDecodeError, binascii.Error):
        return None


def _parse(text: str) -> dict[str, Any] | None:
    """Parses like DeepSpeed: comments allowed, duplicate keys not."""
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        found = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except hjson.HjsonDecodeError:
        return None  # DeepSpeed reports the mistake
    return found if isinstance(found, dict) else None


def selects_us(config: Mapping[str, Any], *, take_over: bool = False) -> bool:
    """Tells whether ``offload_optimizer`` asks for this backend. ``take_over``: so does DeepSpeed's own offload."""
    offload = _section(config, "zero_optimization", "offload_optimizer")
    if take_over and (offload.get("device") == "cpu" or _section(config, "zero_optimization").get("cpu_offload")):
        return True
    return offload.get("device") == DEVICE or bool(offload.get("super_offload"))


def _section(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for key in path:
        found = config.get(key)
        config = found if isinstance(found, Mapping) else {}
    return config


def rewrite(config: dict[str, Any], *, take_over: bool = False) -> dict[str, Any]:
    """Returns a copy that DeepSpeed accepts and that selects its SuperOffload class, replaced by ``enable()``."""
    if not selects_us(config, take_over=take_over):
        if OPTIONS_KEY in config:
            raise ArgumentError(
                f'"{OPTIONS_KEY}": options given, but nothing selects superoffload; expected '
                f'"zero_optimization": {{"stage": 2, "offload_optimizer": {{"device": "{DEVICE}"}}}}, stage 1, 2 or 3'
            )
        return config
    check(config)
    result = copy.copy(config)
    result["zero_optimization"] = dict(config["zero_optimization"])
    result["zero_optimization"].pop("cpu_offload", None)  # an old name of "offload_optimizer"
    offload = dict(_section(config, "zero_optimization", "offload_optimizer"))
    offload["device"], offload["super_offload"] = "cpu", True
    result["zero_optimization"]["offload_optimizer"] = offload
    # torch.optim.AdamW is as good as DeepSpeedCPUAdam: neither one's step() is called.
    result.setdefault("zero_force_ds_cpu_optimizer", False)
    return result


_REFUSED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("zero_optimization", "zenflow"), "ZenFlow is another optimizer schedule; remove one of the two"),
    (("zero_optimization", "zero_quantized_weights"), "quantized weights are not supported; remove the key"),
    (("zero_optimization", "zero_quantized_gradients"), "quantized gradients are not supported; remove the key"),
    (("zero_optimization", "zero_quantized_nontrainable_weights"), "quantized weights are not supported; remove it"),
    (("zero_optimization", "elastic_checkpoint"), ELASTIC),
    (("compile", "deepcompile"), "DeepCompile rewrites the gradient reduction; engine.compile() without it works"),
    (("hybrid_engine", "enabled"), "the hybrid engine is not supported; remove it"),
    (("bf16", "bf16_master_weights_and_grads"), LEANER_MASTERS),
    (("bf16", "bf16_optimizer_states"), LEANER_MOMENTS),
    (("fp16", "fp16_master_weights_and_grads"), "master weights are fp32; remove the key"),
)
_HALF = ("torch.float16", "fp16", "float16", "half")


def check(config: Mapping[str, Any]) -> None:
    """Refuses settings that cannot work with this backend, before DeepSpeed builds anything."""
    read_options(config)
    zero = _section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ArgumentError(
            f'"zero_optimization": stage={stage!r} with offload_optimizer on superoffload: expected 1, 2 or 3; set '
            '"stage": 2, or remove "offload_optimizer"'
        )
    for name in ("offload_optimizer", "offload_param"):
        part = _section(zero, name)
        if part.get("device") == "nvme" or (name == "offload_optimizer" and part.get("nvme_path")):
            raise ArgumentError(
                f'"{name}": NVMe together with superoffload: expected host memory; set "device" to '
                f'"{DEVICE if name == "offload_optimizer" else "cpu"}" and remove "nvme_path"'
            )
    kind = _section(config, "optimizer").get("type")
    if kind is not None and str(kind).lower() not in OPTIMIZERS:  # before DeepSpeed compiles a kernel for it
        raise ArgumentError(
            f'"optimizer": type={kind!r} together with superoffload: expected "Adam" or "AdamW"; for another one set '
            '"offload_optimizer": {"device": "cpu"}'
        )
    autocast = _section(config, "torch_autocast")
    if autocast.get("enabled") and str(autocast.get("dtype")) in _HALF:  # DeepSpeed would keep it for the whole process
        raise ArgumentError(
            f'"torch_autocast": dtype={autocast["dtype"]!r} together with superoffload: its loss scaler is not '
            "supported; use bfloat16, or fp16 without torch_autocast"
        )
    for path, advice in _REFUSED:
        value = _section(config, *path[:-1]).get(path[-1])
        if value:
            raise ArgumentError(f'"{".".join(path)}": {value!r} together with superoffload: {advice}')
    if zero.get("mics_shard_size", -1) not in (-1, 0, None):  # with it, DeepSpeed 0.18 makes another optimizer
        raise ArgumentError(f'"mics_shard_size": {zero["mics_shard_size"]!r}: MiCS is not supported; remove it')
    if zero.get("zero_hpz_partition_size", 1) not in (1, "auto", None):
        raise ArgumentError(
            f'"zero_hpz_partition_size": {zero["zero_hpz_partition_size"]!r} together with superoffload: expected 1; '
            "the second copy of the parameters is not kept up to date"
        )


# ---- features that would give wrong results are refused before DeepSpeed's optimizer is built -----------------------


def check_optimizer(optimizer: Any, cpu_adam: type) -> None:
    """Accepts Adam and AdamW of torch and of DeepSpeed; exactly those types, since a subclass may step differently."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, cpu_adam):
        raise ArgumentError(
            f'optimizer {type(optimizer).__name__}: expected "Adam" or "AdamW" in the config, torch.optim.Adam, '
            "torch.optim.AdamW or deepspeed.ops.adam.DeepSpeedCPUAdam; for another one set "
            '"offload_optimizer": {"device": "cpu"}'
        )
    if not getattr(optimizer, "fp32_optimizer_states", True):
        raise ArgumentError(f"fp32_optimizer_states=False: expected true; {LEANER_MOMENTS}")
    for index, group in enumerate(optimizer.param_groups):
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise ArgumentError(f"param_groups[{index}]: {name}={group[name]!r}: expected False")
        check_hyper_parameters(group)


def hyper_of(optimizer: Any, group: int) -> GroupHyper:
    """Reads a param group's present hyper-parameters."""
    values = optimizer.param_groups[group]
    check_hyper_parameters(values)
    beta1, beta2 = values["betas"]
    return GroupHyper(
        lr=float(values["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(values["eps"]),
        weight_decay=float(values["weight_decay"]),
        l2=not _decoupled(optimizer, values),
        bias_correction=bool(values.get("bias_correction", True)),
    )


def _decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Tells whether weight decay is decoupled from the gradient (AdamW)."""
    if isinstance(optimizer, torch.optim.AdamW):
        return True
    if isinstance(optimizer, torch.optim.Adam):
        return bool(group.get("decoupled_weight_decay", False))
    return bool(optimizer.adam_w_mode)


def is_pipeline(mpu: Any) -> bool:
    """Tells whether ``mpu`` is the grid of DeepSpeed's pipeline engine, with data parallelism beside it alone."""
    return hasattr(mpu, "get_pipe_parallel_world_size") and mpu.get_slice_parallel_world_size() == 1


_OFF: dict[str, Any] = {"zero_hpz_partition_size": 1}  # means off, like None and False; by name, since True == 1


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Checks the keyword arguments of DeepSpeed's ZeRO optimizers."""
    refused = {
        "zenflow_config": "ZenFlow is another optimizer schedule; remove it",
        "all2all_process_group": "quantized gradients are not supported; remove zero_quantized_gradients",
        "zero_hpz_partition_size": "expected 1; the second copy of the parameters is not kept up to date",
        "zero_quantized_weights": "quantized weights are not supported; remove the key",
        "zero_quantized_nontrainable_weights": "quantized weights are not supported; remove the key",
        "fp16_master_weights_and_gradients": "master weights are fp32; remove the key",
        "bf16_master_weights_and_gradients": LEANER_MASTERS,
        "bf16_optimizer_states": LEANER_MOMENTS,
        "elastic_checkpoint": ELASTIC,
    }
    for name, advice in refused.items():
        value = arguments.get(name)
        if value and value != _OFF.get(name):
            raise ArgumentError(f"{name}={value!r} together with superoffload: {advice}")
    mpu = arguments.get("mpu")
    if mpu is not None and not hasattr(mpu, "initialize_sequence_parallel") and not is_pipeline(mpu):
        raise ArgumentError(
            f"mpu={type(mpu).__name__}: tensor parallelism is not supported together with superoffload; pipeline "
            "stages are, with ZeRO-1 and DeepSpeed's own pipeline engine"
        )
    dtype = arguments.get("gradient_accumulation_dtype", torch.float32)
    if dtype not in ELEMENT_TYPES:
        raise ArgumentError(f"grad_accum_dtype={dtype}: expected fp32, bf16 or fp16")


def check_groups_alike(parameters: Any, process_group: Any) -> None:
    """Checks that all parameters are partitioned over the same ranks, so that one verdict serves all."""
    expected = dist.get_process_group_ranks(process_group)
    for parameter in parameters:
        ranks = dist.get_process_group_ranks(getattr(parameter, "ds_process_group", process_group))
        if ranks != expected:
            raise ArgumentError(
                f"a parameter of shape {tuple(parameter.ds_shape)} is partitioned over ranks {ranks}, others over "
                f"{expected} (expert or tensor parallelism), which is not supported together with "
                "superoffload; ZeRO-3 leaf modules work (deepspeed.utils.set_z3_leaf_modules)"
            )
