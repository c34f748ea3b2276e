"""Arguments of ``superoffload.AdamW`` are checked here, numbers by host/numbers.py; messages state the remedy."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from superoffload.distributed.ownership import REPLICATED
from superoffload.engine.bucket import ELEMENT_TYPES
from superoffload.engine.placement import Asked, check_placement
from superoffload.errors import ArgumentError, UnknownArgument, WrongType
from superoffload.host.bits import all_finite
from superoffload.host.numbers import as_float, check_number, check_threads, check_whole_number
from superoffload.host.tensors import is_dense, is_dtensor, local_of
from superoffload.optimizer.accumulation import check_fp32_sums


def check_max_grad_norm(value: Any) -> float | None:
    """Returns None (no clipping) or a finite number above 0."""
    if value is None:
        return None
    number = as_float(value)
    if number == 0.0:
        raise ArgumentError("max_grad_norm=0: every gradient would become 0; pass None to switch clipping off")
    if not 0.0 < number < math.inf:
        raise ArgumentError(f"max_grad_norm={value!r}: expected a finite number above 0, or None for no clipping")
    return number


def check_group(group: Mapping[str, Any]) -> None:
    """Checks the hyper-parameters of one param group."""
    check_hyper_parameters(group)
    if not group.get("bias_correction", True):
        raise ArgumentError(
            f"bias_correction={group['bias_correction']!r}: the moments' bias is always corrected here; leave it "
            "out of the group, or set it to True"
        )


def check_hyper_parameters(group: Mapping[str, Any]) -> None:
    """Checks those hyper-parameters of a param group that every Adam has."""
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise ArgumentError(f"param group: it has no {missing[0]!r}; set it, or add groups with add_param_group()")
    check_number("lr", group["lr"], low=0.0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ArgumentError(f"betas={betas!r}: expected two numbers, such as (0.9, 0.999)")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, low=0.0, high=1.0, below=True)
    check_number("eps", group["eps"], low=0.0)
    check_number("weight_decay", group["weight_decay"], low=0.0)


def check_parameter(name: str, param: Any, *, if_frozen: bool = False) -> None:
    """Checks that a parameter can have its state in host memory. ``if_frozen``: it needs none as long as it is frozen,
    so it may have any dtype then, as quantized parameters have."""
    if not isinstance(param, Tensor):
        raise WrongType(f"{name}: {type(param).__name__}, expected a torch.Tensor (model.parameters())")
    if param.layout is not torch.strided:
        raise ArgumentError(f"{name}: layout {param.layout}, expected a dense tensor; leave sparse parameters out")
    if is_lazy(param):
        raise ArgumentError(f"{name}: not initialized yet; run one forward pass before making the optimizer")
    if param.is_inference():
        raise ArgumentError(f"{name}: made in torch.inference_mode(), where nothing can train; make it outside")
    if param.dtype not in ELEMENT_TYPES and not (if_frozen and not param.requires_grad):
        raise ArgumentError(
            f"{name}: dtype {param.dtype}, expected float32, bfloat16 or float16; convert it or leave it out"
        )
    if param.device.type == "meta":
        raise ArgumentError(f"{name}: on the meta device; materialize the model before making the optimizer")
    param, whole = local_of(param), param
    if param.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{name}: on {param.device}; expected the CPU or a CUDA device: move the model there")
    if not (param.is_contiguous() if is_dtensor(whole) else is_dense(param)):
        raise ArgumentError(
            f"{name}: shape {tuple(param.shape)} with strides {param.stride()}: expected elements that fill a run of "
            "memory, each once, in any order of dimensions (a DTensor: contiguous); make it so with "
            "torch.nn.Parameter(param.detach().contiguous())"
        )
    if param.is_neg():
        raise ArgumentError(
            f"{name}: a view with torch's negative bit, whose memory has the opposite signs; make it a tensor of "
            "its own with torch.nn.Parameter(param.detach().resolve_neg())"
        )
    if not whole.is_leaf:
        raise ArgumentError(f"{name}: not a leaf of autograd; pass the parameters themselves, not results of theirs")


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Returns what the base class accepts (parameters, groups, named parameters) as a list of groups of lists."""
    if isinstance(params, (Tensor, str, bytes, Mapping)) or not isinstance(params, Iterable):
        one = "; a single one goes into a list" if isinstance(params, (Tensor, Mapping)) else ""
        raise WrongType(f"params: {type(params).__name__}, expected an iterable such as model.parameters(){one}")
    _refuse_set(params)
    items = list(params)
    if not items:
        raise ArgumentError("params: empty; expected parameters to train (did a generator run out?)")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    groups = []
    for group in items:
        if not isinstance(group, dict):
            raise WrongType(f"params: {type(group).__name__} among param groups, expected each to be a dict")
        if "params" not in group:
            raise ArgumentError(f"params: {sorted(map(str, group))}, expected param groups, each a dict with 'params'")
        members = group["params"]
        if isinstance(members, (str, bytes, Mapping)) or not isinstance(members, Iterable):
            raise WrongType(f"params: {type(members).__name__} in a param group, expected parameters")
        _refuse_set(members)
        groups.append({**group, "params": [members] if isinstance(members, Tensor) else list(members)})
    return groups


def named_in(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, Tensor]]:
    """Returns every parameter of the groups that ``as_groups`` made, with a name for errors."""
    found = []
    for g, group in enumerate(groups):
        for i, entry in enumerate(group["params"]):
            named = isinstance(entry, tuple)
            found.append((entry[0], entry[1]) if named else (f"parameter {i} of param_groups[{g}]", entry))
    return found


def _refuse_set(params: Any) -> None:
    if isinstance(params, Set) and not isinstance(params, (KeysView, ItemsView)):  # dict views have an order
        raise WrongType(f"params: {type(params).__name__}, whose order changes between runs; expected a list")


def check_groups(
    groups: Iterable[dict[str, Any]], defaults: dict[str, Any], taken: Iterable[Tensor] = (), *, l2: bool = False
) -> None:
    """Checks groups of ``as_groups``: hyper-parameters, parameters, and that none comes twice or is in ``taken``."""
    taken = list(taken)
    seen = {id(param) for param in taken}
    apart = [(f"parameter {i} of the groups before", param) for i, param in enumerate(taken)]
    device = local_of(taken[0]).device if taken else None
    for g, group in enumerate(groups):
        check_group({**defaults, **group})
        refuse_in_group(f"param_groups[{g}]", group)
        refuse_other_steps(f"param_groups[{g}]", {**defaults, **group}, l2=l2)
        named = [isinstance(entry, tuple) and len(entry) == 2 for entry in group["params"]]
        if len(set(named)) > 1:
            raise ArgumentError(f"param_groups[{g}]: some parameters with a name and some without; expected one kind")
        for i, entry in enumerate(group["params"]):
            name = f"parameter {entry[0]!r}" if named[i] else f"parameter {i} of param_groups[{g}]"
            param = entry[1] if named[i] else entry
            check_parameter(name, param, if_frozen=True)
            if id(param) in seen:
                raise ArgumentError(f"{name}: given twice; a tied parameter belongs into one group, once")
            seen.add(id(param))
            apart.append((name, param))
            device = _same_device(name, local_of(param).device, device)
            if param.dtype in ELEMENT_TYPES:
                check_finite(name, param)
    check_apart(apart)


def _same_device(name: str, device: torch.device, others: torch.device | None) -> torch.device:
    if others is not None and device != others:
        raise ArgumentError(
            f"{name}: on {device}, while parameters before it are on {others}; expected one device per optimizer: make "
            "one optimizer for each, or move the model to one"
        )
    return device


def check_keep_grads(value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(f"keep_grads={value!r}: expected True, False or None")


def check_l2(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(f"l2={value!r}: expected True (Adam with an L2 penalty) or False (AdamW)")
    return value


def check_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    """Checks that a gradient can be packed."""
    if is_dtensor(param) and not (is_dtensor(grad) and grad.placements == param.placements):
        found = getattr(grad, "placements", "a plain tensor")
        raise ArgumentError(
            f"{name}: gradient with placements {found}, expected those of the parameter, {param.placements}; let "
            "fully_shard reduce it before step()"
        )
    param, grad = local_of(param), local_of(grad)
    if grad.layout is not torch.strided:
        raise ArgumentError(f"{name}: its gradient has layout {grad.layout}, expected dense (Embedding(sparse=False))")
    fits = grad.dtype in (param.dtype, torch.float32)
    if not fits or grad.numel() != param.numel() or grad.device != param.device:
        or_fp32 = " or torch.float32" if param.dtype != torch.float32 else ""
        raise ArgumentError(
            f"{name}: gradient of {grad.dtype} {tuple(grad.shape)} on {grad.device}, "
            f"expected {param.dtype}{or_fp32} {tuple(param.shape)} on {param.device}; convert it before step()"
        )


def check_finite(name: str, param: Tensor) -> None:
    """Refuses NaN and infinite initial values: they cannot be trained, and speculation would hide their source."""
    values = local_of(param)
    if not all_finite(values):
        bad = int((~torch.isfinite(values)).sum())
        raise ArgumentError(
            f"{name}: {bad} of {values.numel()} initial values are NaN or infinite; initialize it first"
        )


def check_delivery(delivery: Any, module: Any, model: Any, replicated: str) -> None:
    """Checks ``delivery``, and the module whose forward waits for parameters that are delivered on demand."""
    if delivery not in ("eager", "on_demand"):
        raise ArgumentError(f"delivery={delivery!r}: expected 'eager' or 'on_demand'")
    for name, given in (("module", module), ("model", model)):
        if given is not None and not isinstance(given, nn.Module):
            raise ArgumentError(f"{name}: {type(given).__name__}, expected the torch.nn.Module that is trained")
    if module is not None and model is not None and module is not model:
        raise ArgumentError("module and model are not the same; pass one of them, the module whose forward is called")
    if delivery == "on_demand" and module is None and model is None:
        raise ArgumentError("delivery='on_demand' needs the module whose forward passes wait: pass module=")
    if delivery == "on_demand" and replicated == "shard":
        raise ArgumentError(
            "delivery='on_demand' with replicated='shard': the ranks' parts are gathered in step(), so nothing could "
            "be delivered later; pass delivery='eager', or replicated='replicate'"
        )


def check_is_of(model: nn.Module, params: Iterable[Any]) -> None:
    """Refuses a model that has none of the parameters: it is another one, or was sharded or wrapped since."""
    known = {id(param) for param in model.parameters()}
    if not any(id(entry[1] if isinstance(entry, tuple) else entry) in known for entry in params):
        raise ArgumentError(
            f"model: {type(model).__name__}, which has none of params; pass the model whose parameters they are "
            "(fully_shard makes new ones: take model.parameters() after it)"
        )


def check_in_module(module: nn.Module, params: Iterable[Any]) -> None:
    """Refuses parameters that no forward would wait for: they are not in the module, or TorchScript runs it."""
    known = {id(param) for param in module.parameters()}
    scripted = {
        id(param): f"{type(module).__name__}{prefix and '.'}{prefix}"
        for prefix, each in module.named_modules()
        if isinstance(each, torch.jit.ScriptModule)
        for param in each.parameters(recurse=False)
    }
    for i, param in enumerate([params] if isinstance(params, Tensor) else params):
        tensor = param[1] if isinstance(param, tuple) else param
        if id(tensor) in scripted:
            raise ArgumentError(
                f"module: {scripted[id(tensor)]} was made by torch.jit, which runs no hooks that wait for parameters, "
                f"and number {i} of params is in it; pass delivery='eager', or script or trace the module once it is "
                "trained"
            )
        if id(tensor) not in known:
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentError(
                f"params: number {i} ({shape}) is no parameter of module, so nothing waits for it; pass the module "
                "that has all of them, or delivery='eager'"
            )


def check_rank_check(value: Any) -> tuple[bool, int]:
    """Returns (whether every step has a light check, the number of steps between full checks; 0 for none)."""
    if isinstance(value, Mapping) and set(value) == {"full"}:
        every = value["full"]
        if not isinstance(every, bool) and isinstance(every, int) and every >= 1:
            return True, every
    elif value in ("off", "light", "full"):
        return value != "off", int(value == "full")
    raise ArgumentError(f"rank_check={value!r}: expected 'off', 'light', 'full' or {{'full': N}} for every N steps")


def check_process_group(value: Any) -> None:
    """Accepts None (all ranks) or a group of torch.distributed that this rank is in."""
    if value is None:
        return
    import torch.distributed as dist

    if not dist.is_available() or not isinstance(value, dist.ProcessGroup):
        raise ArgumentError(
            f"process_group={value!r}: expected a torch.distributed.ProcessGroup that this rank is in, as "
            "torch.distributed.new_group() or DeviceMesh.get_group() return it, or None for all ranks"
        )


def check_replicated(value: Any) -> str:
    """Returns how ranks treat parameters that each of them has in full."""
    if value is None:
        return "replicate"
    if value not in REPLICATED:
        raise ArgumentError(f"replicated={value!r}: expected 'replicate', 'shard', 'local' or None")
    return str(value)


_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


def check_state_dtype(value: Any) -> torch.dtype:
    """Returns the dtype in which exp_avg and exp_avg_sq are stored."""
    for name, dtype in _STATE_DTYPES.items():
        if value == name or (value == dtype and dtype.is_floating_point):
            return dtype
    raise ArgumentError(f"state_dtype={value!r}: expected 'fp32', 'bf16' or '8bit'")


def check_master_dtype(value: Any, params: Sequence[tuple[str, Tensor]]) -> bool:
    """Returns whether masters of bfloat16 parameters are split. ``params``: with their names, as ``named_in`` returns
    them."""
    if value in ("fp32", torch.float32):
        return False
    if value != "split":
        raise ArgumentError(
            f"master_dtype={value!r}: expected 'fp32', or 'split' to keep the masters of bfloat16 parameters as the "
            "published value and a remainder of 16 bits"
        )
    if not any(param.dtype == torch.bfloat16 for _, param in params):
        name, param = params[0]
        raise ArgumentError(
            f"master_dtype='split': it needs bfloat16 parameters, and there is none ({name} is {param.dtype}); convert "
            "the model with model.to(torch.bfloat16) first, or pass 'fp32'"
        )
    return True


def check_accumulate_dtype(value: Any) -> bool:
    """Returns whether gradients add up in fp32 instead of their parameters' dtype."""
    if value is None or value in ("fp32", torch.float32):
        return value is not None
    raise ArgumentError(f"accumulate_dtype={value!r}: expected 'fp32', or None for the parameter's own dtype")


def check_seed(value: Any) -> int:
    """Returns a whole number of 32 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ArgumentError(f"seed={value!r}: expected a whole number from 0 to {2**32 - 1}")
    return value


# ---- keyword arguments that do not exist, and settings of other optimizers ------------------------------------------


class TorchDefaults(TypedDict, total=False):
    """Lists arguments of ``torch.optim.AdamW`` that change nothing here, with the values that are accepted."""

    amsgrad: Literal[False]
    capturable: Literal[False]
    differentiable: Literal[False]
    foreach: bool | None
    fused: bool | None


_TORCHS = {
    "capturable": "for CUDA graphs, which cannot hold a step in host memory",
    "differentiable": "no gradients flow through this optimizer's step",
    "amsgrad": "another algorithm, which is not offered",
}
_ADAMWS = {
    "accumulate_dtype": "this one reads p.grad as it is: set p.grad_dtype = torch.float32 on the parameters",
    "master_dtype": "masters are fp32 here",
}
_LOOPS = ("foreach", "fused")  # how torch loops over parameters; our loop is native, whatever is asked for
OF_TORCH = (*_TORCHS, "decoupled_weight_decay")  # keys of a group with which torch steps it otherwise


def refuse_unknown(optimizer: type, given: Mapping[str, Any]) -> None:
    """Refuses keyword arguments that the constructor of ``optimizer`` does not have, unless they only name a default
    of torch's optimizers."""
    unknown = {name: value for name, value in given.items() if not _changes_nothing(name, value)}
    if not unknown:
        return
    parameters = inspect.signature(optimizer).parameters.values()
    accepted = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    advice = [f"{name}={_shown(value)}: no such argument; {_advice(name, accepted)}" for name, value in unknown.items()]
    raise UnknownArgument(" ".join([*advice, f"{optimizer.__name__} accepts {', '.join(accepted)}"]))


def _changes_nothing(name: str, value: Any) -> bool:
    if name in _LOOPS:
        return value is None or isinstance(value, bool)
    return name in _TORCHS and value is False


# Names that other optimizers have for our settings.
_OTHER_NAMES = {"learning_rate": "lr", "wd": "weight_decay", "beta1": "betas", "beta2": "betas"}


def refuse_in_group(where: str, group: Mapping[str, Any]) -> None:
    """Refuses settings in a param group that would have no effect. Users may keep other keys in their groups."""
    for name, value in group.items():
        if name in _OTHER_NAMES:
            raise UnknownArgument(
                f"{where}: {name}={_shown(value)} would not be read; did you mean {_OTHER_NAMES[name]}?"
            )
        if _is_clipping(name.lower()):
            raise UnknownArgument(
                f"{where}: {name}={_shown(value)} would not be read: the norm is that of all groups together; leave it "
                "out and pass max_grad_norm to superoffload.AdamW"
            )


def refuse_other_steps(where: str, group: Mapping[str, Any], *, l2: bool = False) -> None:
    """Refuses keys that torch obeys and we do not, in a param group that is made, loaded or changed later.

    ``l2``: the optimizer is Adam with an L2 penalty instead of AdamW.
    """
    for name in ("amsgrad", "differentiable"):  # a compiled function sets capturable, and steps the same values with it
        if is_on(group.get(name)):
            raise UnknownArgument(
                f"{where}: {name}={_shown(group[name])}: torch.optim.AdamW has it ({_TORCHS[name]}): leave it out, or "
                f"set {name}=False"
            )
    maximize = group.get("maximize", False)
    if maximize is not None and not isinstance(maximize, bool):
        raise ArgumentError(f"{where}: maximize={_shown(maximize)}: expected True or False")
    theirs = not is_on(group.get("decoupled_weight_decay", not l2))
    if theirs is not l2 and as_float(group["weight_decay"]) != 0.0:
        kinds = {True: "Adam with an L2 penalty", False: "AdamW"}
        raise ArgumentError(
            f"{where}: decoupled_weight_decay={not theirs}, so it is of {kinds[theirs]}, and this optimizer is "
            f"{kinds[l2]}; superoffload.CPUAdamW has both (l2=)"
        )


def is_on(flag: Any) -> bool:
    """Returns whether a flag is set. It may be a tensor, and one of many elements has no truth value in Python."""
    return flag is not None and as_float(int(flag) if isinstance(flag, bool) else flag) != 0.0


def _is_clipping(words: str) -> bool:
    return "clip" in words or ("norm" in words and ("max" in words or "grad" in words))


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"<{type(value).__name__}>"


def _advice(name: str, accepted: list[str]) -> str:
    if name in _LOOPS:
        return "it chooses torch's loop over parameters, and changes nothing here: expected True, False or None."
    if name in _TORCHS:
        return f"torch.optim.AdamW has it ({_TORCHS[name]}): leave it out, or pass {name}=False."
    if name in _ADAMWS:
        return f"superoffload.AdamW has it; {_ADAMWS[name]}."
    words = name.lower()
    if _is_clipping(words):
        if "max_grad_norm" in accepted:
            return "did you mean max_grad_norm, the threshold of the global gradient norm?"
        return "this one does not clip: call torch.nn.utils.clip_grad_norm_, or use superoffload.AdamW(max_grad_norm=)."
    alike = [_OTHER_NAMES[words]] if words in _OTHER_NAMES else get_close_matches(words, accepted, n=1)
    if words in ("grad_dtype", "gradient_dtype"):  # of which the nearest spelling is another argument
        alike = ["accumulate_dtype"]
    return f"did you mean {alike[0]}?" if alike else "nothing here has a similar name."


# ---- parameters that share memory -----------------------------------------------------------------------------------


def check_apart(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ArgumentError if two parameters that train, of one device, have elements in the same memory.

    Parameters that are different parts of one flat tensor are apart. A parameter fills a run of memory, so that its
    first byte and its size tell.
    """
    end, last = 0, ""
    for begin, nbytes, name in sorted(_run(name, local_of(param)) for name, param in named if param.requires_grad):
        if nbytes and begin < end:
            raise ArgumentError(
                f"{name}: shares memory with {last}, and each would be stepped by itself and overwrite the other. To "
                "tie parameters, use one of them in both places (head.weight = embedding.weight, not .data); else "
                "give one of them memory of its own (.clone())"
            )
        end, last = max(end, begin + nbytes), name


def _run(name: str, local: Tensor) -> tuple[int, int, str]:
    return local.data_ptr(), local.numel() * local.element_size(), name


# ---- all arguments of the constructor, before anything is made or changed -------------------------------------------


@dataclass(frozen=True)
class ConstructorArguments:
    """Keeps the arguments that an optimizer needs again when it starts anew on other parameters."""

    speculation: str
    on_demand: bool
    bucket_numel: int | None
    threads: int | None
    replicated: str
    check: tuple[bool, int]
    process_group: Any
    rank_timeout: float | None
    model: Callable[[], nn.Module | None]  # returns None once the model is freed
    keep_grads: bool | None
    placement: Asked
    fp32_sums: bool
    state_dtype: torch.dtype
    split_masters: bool
    seed: int

    def shown(self) -> dict[str, Any]:
        """Returns the arguments that ``repr(optimizer)`` shows, by their names."""
        return {
            "speculation": self.speculation,
            "delivery": "on_demand" if self.on_demand else "eager",
            "state_dtype": self.state_dtype,
            "master_dtype": "split" if self.split_masters else torch.float32,
            "accumulate_dtype": torch.float32 if self.fp32_sums else None,
            "placement": {"gpu_fraction": self.placement} if isinstance(self.placement, float) else self.placement,
            "replicated": self.replicated,
        }


def check_given(
    params: Any, defaults: dict[str, Any], given: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], ConstructorArguments]:
    """Checks all arguments, ``given`` by name; returns the param groups and the other arguments."""
    placement = check_placement(given["placement"])
    check_keep_grads(given["keep_grads"])
    check_whole_number("bucket_numel", given["bucket_numel"])
    check_process_group(given["process_group"])
    check = check_rank_check(given["rank_check"])
    replicated = check_replicated(given["replicated"])
    delivery, module = given["delivery"], given["module"]
    check_delivery(delivery, module, given["model"], replicated)
    model: nn.Module | None = module if module is not None else given["model"]
    check_threads("threads", given["threads"])
    groups = as_groups(params)
    if not any(group["params"] for group in groups):  # one empty group among others is common: nothing to decay
        raise ArgumentError("params: only empty param groups; expected parameters to train")
    check_groups(groups, defaults)
    if model is not None:
        check_model = check_in_module if delivery == "on_demand" else check_is_of
        check_model(model, [param for group in groups for param in group["params"]])
    fp32_sums = check_accumulate_dtype(given["accumulate_dtype"])
    if fp32_sums:
        check_fp32_sums(named_in(groups), model)
    return groups, ConstructorArguments(
        speculation=given["speculation"],
        on_demand=delivery == "on_demand",
        bucket_numel=given["bucket_numel"],
        threads=given["threads"],
        replicated=replicated,
        check=check,
        process_group=given["process_group"],
        rank_timeout=given["rank_timeout"],
        model=weakref.ref(model) if model is not None else _no_model,
        keep_grads=given["keep_grads"],
        placement=placement,
        fp32_sums=fp32_sums,
        state_dtype=check_state_dtype(given["state_dtype"]),
        split_masters=check_master_dtype(given["master_dtype"], named_in(groups)),
        seed=check_seed(given["seed"]),
    )


def params_of(groups: list[dict[str, Any]]) -> list[Tensor]:
    """Returns the parameters of groups from ``as_groups``, without names."""
    return [entry[1] if isinstance(entry, tuple) else entry for group in groups for entry in group["params"]]


def _no_model() -> None:
    """Returns None where no model was given."""
