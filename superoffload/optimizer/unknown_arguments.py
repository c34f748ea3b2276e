"""Keyword arguments that an optimizer does not have raise an error that names the one that was meant."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypedDict

from superoffload.errors import ArgumentError, UnknownArgument
from superoffload.host.numbers import as_float


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
    for name, why in _TORCHS.items():
        if is_on(group.get(name)):
            raise UnknownArgument(
                f"{where}: {name}={_shown(group[name])}: torch.optim.AdamW has it ({why}): leave it out, or set "
                f"{name}=False"
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
