"""Before there is any state, an optimizer joins the other ranks and makes an engine with a link to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from superoffload.distributed.session import RankSetup, qualified_names, set_up_ranks
from superoffload.engine.bucket import GroupHyper
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions, Listener, Recorder
from superoffload.engine.placement import placer_for
from superoffload.host.processors import worker_cpus
from superoffload.links.select import keeps_gradients, link_for, on_device
from superoffload.optimizer import frameworks
from superoffload.optimizer.arguments import ConstructorArguments
from superoffload.optimizer.gradient_source import gradient_of
from superoffload.optimizer.placeholder import GradientPlaceholder


@dataclass(frozen=True)
class EngineSetup:
    """Holds the engine and the ranks for one set of parameters, which have no state yet.

    ``names`` has the names of the model's parameters by id, ``resident`` the ids of those whose state begins on the
    device."""

    engine: Engine
    listener: Listener
    ranks: RankSetup
    names: dict[int, str]
    resident: set[int]


def set_up_engine(
    given: ConstructorArguments, params: Sequence[Tensor], hyper_of: Callable[[int], GroupHyper], recorder: Recorder
) -> EngineSetup:
    """Joins the other ranks, where there are any, and makes an engine."""
    model = given.model()
    names = qualified_names(model)
    reduced = frameworks.reduces_later(model)
    ranks = set_up_ranks(
        params,
        reduced=reduced,
        forward_view=lambda: frameworks.forward_view(model),
        replicated=given.replicated,
        check=given.check,
        process_group=given.process_group,
        timeout=given.rank_timeout,
        gradient_of=_in_memory,
    )
    cpus = worker_cpus(given.threads, ranks.cpus, beside_device=on_device(params))
    keep_grads = keeps_gradients(params, given.keep_grads, reduced=reduced)
    sizes = _sizes(params, names, ranks) if given.placement is not None else []
    # Nothing is stepped early or late then, so that on the CPU gradients and parameters need no second copy.
    at_once = given.speculation == "never" and not given.on_demand
    link = link_for(params, keep_grads=keep_grads, in_place=at_once)
    options = EngineOptions(given.speculation, given.bucket_numel, cpus, two_phase=not link.in_place)
    try:
        placer = placer_for(given.placement, link, params)
    except BaseException:
        link.close()
        raise
    resident = placer.choose_first(sizes) if placer is not None else set()
    listener = Listener()
    engine = Engine(link, options, hyper_of, listener=listener, recorder=recorder, placer=placer)
    return EngineSetup(engine, listener, ranks, names, resident)


def _in_memory(param: Tensor) -> Tensor | None:
    """Returns the gradient of ``param``, unless it was packed and freed."""
    gradient = gradient_of(param)
    return None if isinstance(gradient, GradientPlaceholder) else gradient


def _sizes(params: Sequence[Tensor], names: dict[int, str], ranks: RankSetup) -> list[tuple[int, int]]:
    """Returns (id, number of elements whose state this rank has) of all parameters that train."""
    trained = [param for param in params if param.requires_grad]
    named = [(names.get(id(param), "params"), param) for param in trained]
    return [(id(param), ranks.holding_of(name, param).part(param).numel()) for name, param in named]
