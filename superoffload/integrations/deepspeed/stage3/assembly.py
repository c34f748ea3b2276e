"""Puts ``SpeculativeStage3`` together: each part gets the parts that it needs, and none knows the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from superoffload.engine.options import EngineOptions
from superoffload.errors import StateError
from superoffload.integrations.deepspeed import residency
from superoffload.integrations.deepspeed.config import Options
from superoffload.integrations.deepspeed.driver import PartitionDriver
from superoffload.integrations.deepspeed.partitions import cpus_of_this_rank, open_session
from superoffload.integrations.deepspeed.stage3.agreement import Failures, Ranks, agreement
from superoffload.integrations.deepspeed.stage3.copies import copies_of
from superoffload.integrations.deepspeed.stage3.formulas import Formulas, OurFormulas, StockFormulas
from superoffload.integrations.deepspeed.stage3.gradients import Gradients
from superoffload.integrations.deepspeed.stage3.inner_optimizer import InnerOptimizer
from superoffload.integrations.deepspeed.stage3.saved_state import SavedState
from superoffload.integrations.deepspeed.stage3.shards import Shards, accelerator_link
from superoffload.integrations.deepspeed.stage3.steps import Steps, WindowEnd
from superoffload.integrations.deepspeed.stage3.stock import StockStage3, trained
from superoffload.integrations.deepspeed.whole_parameters import Readers
from superoffload.optimizer.arguments import check_rank_check


@dataclass(frozen=True)
class Given:
    """Holds what DeepSpeed's optimizer gives to its parts."""

    stock: StockStage3
    options: Options
    boundary_is_told: bool
    norm_of: Callable[[Tensor], Any]  # DeepSpeed's, of one gradient partition
    norms_of_groups: Callable[[], Sequence[Any]]  # DeepSpeed's, over all ranks, from what ``norm_of`` returned
    before_gather: Callable[[list[Any]], None]
    after_update: Callable[[list[Any]], None]


@dataclass(frozen=True)
class Parts:
    """Holds what ``SpeculativeStage3`` owns. Each part knows those before it."""

    driver: PartitionDriver
    inner: InnerOptimizer
    ranks: Ranks
    failures: Failures
    gradients: Gradients
    formulas: Formulas
    window_end: WindowEnd
    steps: Steps
    saved_state: SavedState
    readers: Readers

    def abandon(self) -> None:
        """Abandons the window if there was no ``step()`` since backward."""
        self.gradients.abandon()

    def deliver(self, params: Sequence[Any]) -> None:
        """Delivers parameters before they are gathered."""
        with self.failures.kept():
            self.driver.deliver([param.ds_id for param in params])

    def take_over(self, params: Sequence[Any]) -> None:
        """Makes the masters follow parameters that ``GatheredParameters(..., modifier_rank=...)`` wrote."""
        self.ranks.forget_look()
        for param in params:
            self.driver.take_over(param.ds_id)

    def close(self) -> None:
        """Undoes what was speculated, delivers what was not delivered, ends the worker threads."""
        self.driver.close()

    def end_threads(self) -> None:
        """Ends the worker threads and leaves speculated state as it is."""
        self.driver.engine.pool.close()

    def unwrap_readers(self) -> None:
        """Restores the parameters' own gathering functions."""
        self.readers.close()


class Closed:
    """Replaces the parts of an optimizer that was destroyed, or never finished."""

    def abandon(self) -> None: ...

    def deliver(self, params: Sequence[Any]) -> None: ...

    def take_over(self, params: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    def end_threads(self) -> None: ...

    def unwrap_readers(self) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError("this optimizer was destroyed; make a new engine with deepspeed.initialize()")


def assemble(given: Given, module_parameters: Sequence[Any]) -> Parts:
    """Makes the parts for DeepSpeed's layout. Collective."""
    stock, options = given.stock, given.options
    resident = residency.resident_sub_groups(stock.subgroup_to_device)
    accelerator = accelerator_link(stock, resident)
    shards = Shards(stock, options, resident)
    inner = InnerOptimizer(stock, shards.states)
    published, group = stock.fp16_partitioned_groups_flat, stock.dp_process_group
    cpus, crowded = cpus_of_this_rank(options.threads, published, group, options.rank_timeout)
    driver = PartitionDriver(
        shards.partitions,
        len(stock.fp16_groups),
        EngineOptions(options.speculation, options.bucket_numel, cpus),
        inner.hyper,
        pin=any(flat.device.type != "cpu" for flat in published),
        accelerator=accelerator,
    )
    check = check_rank_check(options.rank_check)
    mine = [partition.shard for partition in shards.partitions]
    session = open_session(
        list(trained(stock)), mine, [shard.name for shard in mine], check, group, options.rank_timeout
    )
    ranks, failures = agreement(session, driver, inner.settings), Failures()
    gradients = Gradients(
        stock, driver, copies_of(stock, driver), ranks, failures, boundary_is_told=given.boundary_is_told
    )
    formulas = (
        StockFormulas(stock, driver, given.norm_of, given.norms_of_groups) if options.match_stock else OurFormulas()
    )
    window_end = WindowEnd(stock, driver, ranks, failures, formulas)
    on_demand = options.delivery == "on_demand"
    steps = Steps(stock, driver, inner, ranks, failures, on_demand=on_demand, crowded=crowded)
    saved_state = SavedState(driver, inner, shards.states, ranks, gradients)
    readers = Readers(
        module_parameters,
        before_gather=given.before_gather if on_demand else None,
        after_update=given.after_update,
    )
    return Parts(driver, inner, ranks, failures, gradients, formulas, window_end, steps, saved_state, readers)
