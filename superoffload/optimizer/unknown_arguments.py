"""Keyword arguments that an optimizer does not have raise an error that names the one that was meant."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from superoffload.errors import UnknownArgument


class TorchDefaults(TypedDict, total=False):
    """Lists arguments of ``torch.optim.AdamW`` that are not ours, with the values that change nothing here."""

    amsgrad: Literal[False]
    maximize: Literal[False]
    capturable: Literal[False]
    differentiable: Literal[False]
    foreach: Literal[False] | None
    fused: Literal[False] | None


# Other optimizers and trainers use these names for our arguments; their spelling is too different to be matched.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta1": "betas",
    "beta2": "betas",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "workers": "threads",
    "num_workers": "threads",
    "bucket_size": "bucket_numel",
    "moments_dtype": "state_dtype",
    "optimizer_dtype": "state_dtype",
    "grad_dtype": "accumulate_dtype",
    "gradient_dtype": "accumulate_dtype",
    "grad_accum_dtype": "accumulate_dtype",
    "network": "model",
}
_TORCHS = {
    "foreach": "how torch loops over parameters; our loop is native",
    "fused": "how torch loops over parameters; our loop is native",
    "capturable": "for CUDA graphs, which cannot hold a step in host memory",
    "differentiable": "no gradients flow through this optimizer's step",
    "amsgrad": "another algorithm, which is not offered",
    "maximize": "not offered: minimize the negative loss",
}
_DEEPSPEEDS = {
    "adamw_mode": "AdamW is what you get here; plain Adam is CPUAdamW(l2=True)",
    "bias_correction": "the moments' bias is always corrected here",
    "fp32_optimizer_states": 'here state_dtype is "fp32", "bf16" or "8bit"',
}
_ADAMWS = {
    "accumulate_dtype": "this one reads p.grad as it is: set p.grad_dtype = torch.float32 on the parameters",
    "master_dtype": "masters are fp32 here",
}


# None lets torch choose its loop over parameters.
_MAY_BE_NONE = ("foreach", "fused")
# These change the result or how it can be used; torch's choice of a loop does neither.
_CHANGE_THE_STEP = ("amsgrad", "maximize", "capturable", "differentiable")


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
    return name in _TORCHS and (value is False or (value is None and name in _MAY_BE_NONE))


_NO_KEYS_OF_GROUPS = ("learning_rate", "wd", "beta1", "beta2", "adam_beta1", "adam_beta2")


def refuse_in_group(where: str, group: Mapping[str, Any]) -> None:
    """Refuses settings in a param group that would have no effect. Users may keep other keys in their groups."""
    for name, value in group.items():
        if name in _CHANGE_THE_STEP and value:
            raise UnknownArgument(
                f"{where}: {name}={_shown(value)}: torch.optim.AdamW has it ({_TORCHS[name]}): leave it out, or "
                f"pass {name}=False"
            )
        if name in _NO_KEYS_OF_GROUPS:
            raise UnknownArgument(
                f"{where}: {name}={_shown(value)} would not be read; did you mean {_OTHER_NAMES[name]}?"
            )
        if _is_clipping(name.lower()):
            raise UnknownArgument(
                f"{where}: {name}={_shown(value)} would not be read: the norm is that of all groups together; leave it "
                "out and pass max_grad_norm to superoffload.AdamW"
            )


def _is_clipping(words: str) -> bool:
    return "clip" in words or ("norm" in words and ("max" in words or "grad" in words))


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"<{type(value).__name__}>"


def _advice(name: str, accepted: list[str]) -> str:
    if name in _TORCHS:
        return f"torch.optim.AdamW has it ({_TORCHS[name]}): leave it out, or pass {name}=False."
    if name in _DEEPSPEEDS:
        return f"DeepSpeedCPUAdam has it ({_DEEPSPEEDS[name]}): leave it out."
    if name in _ADAMWS:
        return f"superoffload.AdamW has it; {_ADAMWS[name]}."
    words = name.lower()
    if _is_clipping(words):
        if "max_grad_norm" in accepted:
            return "did you mean max_grad_norm, the threshold of the global gradient norm?"
        return "this one does not clip: call torch.nn.utils.clip_grad_norm_, or use superoffload.AdamW(max_grad_norm=)."
    meant = _OTHER_NAMES.get(words)
    if meant not in accepted:
        meant = next(iter(get_close_matches(words, accepted, n=1)), None) or _containing(words, accepted)
    return f"did you mean {meant}?" if meant else "nothing here has a similar name."


def _containing(words: str, accepted: list[str]) -> str | None:
    """Finds an argument that is a word of the name, as threads is of num_threads."""
    return next((known for known in accepted if known in words.split("_")), None)
