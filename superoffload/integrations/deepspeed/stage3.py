"""DeepSpeed's ZeRO-3 optimizer with its optimizer part replaced by the core. The only file with DeepSpeed's names.

Sharding, collectives, hooks, accumulation rules and loss scaling stay DeepSpeed's. Ours: where gradients go when they
were reduced (``partition_grads``), the end of a step (``step``), and who waits for it (readers of state).
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import stage3 as stock
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from superoffload.arguments import check_rank_check
from superoffload.bucket import Shard
from superoffload.core import CoreOptions
from superoffload.errors import RankError, StateError, WorkerError
from superoffload.integrations.deepspeed import residency
from superoffload.integrations.deepspeed.config import load, read_options
from superoffload.integrations.deepspeed.delivery import Readers, gather_together
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver, Window
from superoffload.integrations.deepspeed.features import (
    check_arguments,
    check_groups_alike,
    check_optimizer,
    hyper_of,
)
from superoffload.integrations.deepspeed.ranks import cpus_of_this_rank, open_session
from superoffload.interrupts import held_signals
from superoffload.link import Link
from superoffload.memory import host_zeros
from superoffload.ranks.session import RankSession
from superoffload.verdict import Verdict

_OPEN: weakref.WeakSet[SpeculativeStage3] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for optimizer in list(_OPEN):
        optimizer.close()


def _exchanged(session: RankSession, window: Window) -> Sequence[float]:
    session.start(window.sums)
    return session.finish() or []


def _fold(sums: Sequence[float]) -> float:
    """Of all ranks, in their order, so that it has the same bits on all of them."""
    total = sum(sums)
    return total if math.isfinite(total) else math.inf


class SpeculativeStage3(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 whose optimizer steps during backward, on the CPU, with a result that speculation never changes."""

    def __init__(
        self, module: Any, init_optimizer: Any, param_names: Any, timers: Any, ds_config: Any, **kwargs: Any
    ) -> None:
        config = load(ds_config) or {}
        self.superoffload_options = read_options(config)
        check_optimizer(init_optimizer, DeepSpeedCPUAdam)
        self._on_cpu = bool(get_accelerator().is_synchronized_device())
        check_arguments(kwargs)
        self._boundary_is_told = bool(config.get("managed_gradient_accumulation", True))
        self._driver: PartitionDriver | None = None
        self._readers: Readers | None = None
        self._arriving: deque[tuple[Any, list[tuple[Partition, int]]]] = deque()
        self._failure: WorkerError | None = None
        self._session: RankSession | None = None
        self._look_is_due = False
        self._later = False  # what the last step publishes may not be there yet
        self._crowded = False  # more ranks than processors: nothing is left for later, where it would be in the way
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **kwargs)
        if self.torch_autocast_gradscaler is not None:
            raise StateError("torch_autocast with fp16: its loss scaler is not supported; use bf16, or fp16 without it")
        check_groups_alike(self._trained(), self.dp_process_group)
        self._driver = self._make_driver()
        self._session = self._open_session(self._driver)
        self._readers = Readers(
            self.module.parameters(),
            before_gather=self._before_gather if self._delivers_later else None,
            after_update=self._after_update,
        )
        _OPEN.add(self)
        for param in self._trained():
            param.superoffload_steps_it = True  # clipping.py asks

    # ---- construction ---------------------------------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        """No fp32 gradient per sub-group: the kernel reads the accumulated one. State is made with the shards."""

    @property
    def _delivers_later(self) -> bool:
        return bool(self.superoffload_options.delivery == "on_demand")

    def _trained(self) -> Iterator[Any]:
        for group in self.fp16_groups:
            yield from group

    def _make_driver(self) -> PartitionDriver:
        resident = residency.resident_sub_groups(self.subgroup_to_device)
        accelerator = self._accelerator_link(resident)
        self._make_moments(resident)
        partitions: list[Partition] = []
        start = 0  # in the flat buffer in host memory, which has room for all
        for sub_group, params in enumerate(self.fp16_groups):
            flat = self.fp32_partitioned_groups_flat[sub_group]
            total = sum(int(param.partition_numel()) for param in params)
            gradients = self.grad_partitions_flat_buffer[start : start + total]
            start += total
            if sub_group in resident:
                gradients = torch.zeros_like(gradients, device=flat.device)
            offset = 0
            for param in params:
                size, numel = int(param.partition_numel()), self._numel_here(param)
                padded = gradients[offset : offset + size]
                shard = self._make_shard(param, len(partitions), sub_group, offset, numel)
                shard.resident = sub_group in resident
                partitions.append(Partition(param.ds_id, sub_group, shard, padded[:numel], padded))
                # Nobody steps the padding, which DeepSpeed leaves uninitialized: checkpoints would differ.
                flat.data[offset + numel : offset + size].zero_()
                offset += size
        options = self.superoffload_options
        cpus, self._crowded = cpus_of_this_rank(
            options.threads, self.fp16_partitioned_groups_flat, self.dp_process_group
        )
        reference = weakref.ref(self.optimizer)  # an engine that is let go of must not keep itself alive
        return PartitionDriver(
            partitions,
            len(self.fp16_groups),
            CoreOptions(options.speculation, options.bucket_numel, cpus),
            lambda group: hyper_of(reference(), group),
            pin=any(flat.device.type != "cpu" for flat in self.fp16_partitioned_groups_flat),
            accelerator=accelerator,
        )

    def _accelerator_link(self, resident: frozenset[int]) -> Link | None:
        if not resident:
            return None
        masters = {sub_group: self.fp32_partitioned_groups_flat[sub_group] for sub_group in resident}
        residency.check_resident(masters, {i: self.fp16_partitioned_groups_flat[i] for i in resident})
        return residency.accelerator_link(masters[min(resident)].device)

    def _make_moments(self, resident: frozenset[int]) -> None:
        for sub_group, flat in enumerate(self.fp32_partitioned_groups_flat):
            self.optimizer.state[flat]["step"] = self._step_value(0)
            for name in ("exp_avg", "exp_avg_sq"):
                on_device = sub_group in resident
                zeros = torch.zeros_like(flat.data) if on_device else host_zeros(flat.numel(), torch.float32)
                self.optimizer.state[flat][name] = zeros

    def _open_session(self, driver: PartitionDriver) -> RankSession | None:
        shards = [partition.shard for partition in driver.partitions.values()]
        names = [shard.name for shard in shards]
        options = self.superoffload_options
        check = check_rank_check(options.rank_check)
        return open_session(list(self._trained()), shards, names, check, self.dp_process_group, options.rank_timeout)

    def _numel_here(self, param: Any) -> int:
        """Elements of ``param`` on this rank, without the padding of the last partition."""
        size = int(param.partition_numel())
        first = size * int(dist.get_rank(group=self.dp_process_group))
        return max(0, min(size, int(param.ds_numel) - first))

    def _make_shard(self, param: Any, index: int, sub_group: int, offset: int, numel: int) -> Shard:
        flat = self.fp32_partitioned_groups_flat[sub_group]
        state = self.optimizer.state[flat]
        published = weakref.WeakMethod(self._published)

        def target() -> Tensor:
            found = published()
            assert found is not None, "shards are used by their optimizer only"
            return found(sub_group, offset, numel)

        return Shard(
            index=index,
            name=str(self.param_names.get(param, f"parameter {param.ds_id}")),
            group=self.sub_group_to_group_id[sub_group],
            numel=numel,
            gradient_dtype=self.gradient_accumulation_dtype,
            published_dtype=self.fp16_partitioned_groups_flat[sub_group].dtype,
            master=flat.data[offset : offset + numel],
            exp_avg=state["exp_avg"][offset : offset + numel],
            exp_avg_sq=state["exp_avg_sq"][offset : offset + numel],
            target=target,
        )

    def _published(self, sub_group: int, offset: int, numel: int) -> Tensor:
        """Looked up each time: DeepSpeed moves these buffers when states are offloaded and reloaded."""
        flat: Tensor = self.fp16_partitioned_groups_flat[sub_group]
        return flat.data[offset : offset + numel]

    def _step_value(self, steps: int) -> Any:
        """DeepSpeedCPUAdam counts in an int, torch in a tensor."""
        return steps if isinstance(self.optimizer, DeepSpeedCPUAdam) else torch.tensor(float(steps))

    # ---- gradients ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> list[Tensor]:
        """Reduced gradient partitions, on DeepSpeed's reduce stream: into the flat buffer, and on to speculation."""
        driver = self._opened()
        taken = []
        with held_signals():
            with self._for_the_next_step():
                self._look()
            for param, incoming in zip(params_to_release, grad_partitions, strict=True):
                with self._for_the_next_step():
                    driver.let_go(driver.partitions[param.ds_id])
                taken.append(driver.take(param.ds_id, incoming))
                if not self._on_cpu and param.grad is not None:
                    param.grad.record_stream(get_accelerator().current_stream())
                param.grad = None
            self._pass_on([partition for partition in taken if self._is_last(partition)])
        return [partition.gradient for partition in taken]

    def _is_last(self, partition: Partition) -> bool:
        """Whether this gradient is most likely the window's last. If not, the next one undoes what was done with it."""
        told = self.is_gradient_accumulation_boundary
        if callable(told):  # a method since 0.19
            told = told()
        if self._boundary_is_told and (self.gradient_accumulation_steps > 1 or not told):
            return bool(told)
        return partition.arrivals >= partition.expected  # as many as last time

    def _pass_on(self, partitions: list[Partition]) -> None:
        arrivals = [(partition, partition.arrivals) for partition in partitions]
        if self._on_cpu:
            self._hand_over(arrivals)
            return
        event = get_accelerator().Event()
        event.record(get_accelerator().current_stream())
        self._arriving.append((event, arrivals))
        while self._arriving and self._arriving[0][0].query():
            self._hand_over(self._arriving.popleft()[1])

    def _await_gradients(self) -> None:
        """Everything that was reduced is in host memory."""
        if not self._on_cpu:
            self.reduce_and_partition_stream.synchronize()
        while self._arriving:
            self._hand_over(self._arriving.popleft()[1])

    def _hand_over(self, arrivals: list[tuple[Partition, int]]) -> None:
        """Not where another gradient has come since: its copy may still run."""
        driver = self._opened()
        for partition, arrival in arrivals:
            if partition.arrivals == arrival:
                driver.final(partition, unscale=1.0 / self.loss_scale, max_grad_norm=self.clip_grad or None)

    def _finalize_offload_gradient_accumulation(self) -> None:
        """The end of an unmanaged window: what has not gone to speculation yet goes at the start of ``step()``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Without a ``step()`` since backward, the window is abandoned: nothing has changed."""
        if self._driver is not None:
            with held_signals():
                self._arriving.clear()
                self._driver.abandon()
        super().zero_grad(set_to_none)

    # ---- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """DeepSpeed's order of events, with one verdict for all sub-groups."""
        if closure is not None:
            raise StateError("step(closure): closures are not supported, as in DeepSpeed; call engine.step()")
        if self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks:
            raise StateError("step hooks are not called under DeepSpeed; do around engine.step() what they do")
        with held_signals():
            self._await_gradients()
            self._pre_step()
            self._partition_all_parameters()
            self.timers(stock.OPTIMIZER_STEP_TIMER).start()
            self._step_window()
            self.timers(stock.OPTIMIZER_STEP_TIMER).stop()
            if not self.overflow:
                self._post_step({stock.OPTIMIZER_STEP_TIMER})
            self._check_ranks()

    @contextmanager
    def _for_the_next_step(self) -> Iterator[None]:
        """A failed worker between steps: to raise on one rank alone would leave the others waiting for it."""
        try:
            yield
        except WorkerError as failure:
            self._failure = self._failure or failure

    def _close_window(self) -> tuple[Window, Tensor]:
        """This rank's window, and the norm of the scaled gradients over all ranks, from fp64 sums."""
        driver, session = self._opened(), self._session
        frozen = {param.ds_id for param in self._trained() if not param.requires_grad}
        if session is not None:
            session.begin()
            session.agree_on(self._settings(), found_inf=False)
        window = Window({})
        with self._for_the_next_step():
            self._look()
            window = driver.close_window(lambda key: key not in frozen)
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise WorkerError(f"{failure}; no rank stepped")
            total = _fold(list(window.sums.values()) if session is None else _exchanged(session, window))
        except (WorkerError, RankError):
            if session is not None:
                session.fail()
            driver.abandon()
            raise
        return window, torch.tensor(math.sqrt(total), dtype=torch.float64)

    def _settings(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        found: dict[str, Any] = {}
        for index in range(len(self.optimizer.param_groups)):
            for name, value in asdict(hyper_of(self.optimizer, index)).items():
                found[f"{name} of group {index}"] = value
        return {**found, "gradient_clipping": float(self.clip_grad), "loss scale": float(self.loss_scale)}

    def _step_window(self) -> None:
        driver = self._opened()
        window, norm = self._close_window()
        scale = float(self.loss_scale)
        unclipped, speculating, self._later = 1.0 / scale, driver.core.policy.wants(), False
        if self.superoffload_options.match_stock:
            norm = self._stock_norm(window)
        self.overflow = not math.isfinite(float(norm))
        if self.overflow:
            with self._for_the_next_step():
                driver.step(Verdict(math.inf, 1.0, True, 1.0 / scale), later=False)
            self._ended(applied=False, factor=1.0 / scale)
            self._update_scale(True)
            self._global_grad_norm: Any = float("inf")
            self._overflow_clean_up(scale)
            return
        self._update_scale(False)
        if self.superoffload_options.match_stock:
            scale = float(self.loss_scale)  # stock unscales with the scale of the next step
        self._global_grad_norm = (norm / scale).float()
        if window.sums:
            coefficient, factor = self._clip(norm, scale)
            verdict = Verdict(float(self._global_grad_norm), coefficient, False, factor)
            # Where backward has done the work, there is nothing to wait for later, and persistent parameters are
            # gathered together. Not a question of what is done on this rank: all ranks must gather alike.
            in_the_way = self._crowded or (speculating and factor == unclipped)
            self._later = self._delivers_later and not in_the_way
            with self._for_the_next_step():  # the step was completed all the same
                driver.step(verdict, later=self._later)
            self._ended(applied=True, factor=factor)
        self._show_steps()
        self.optimizer._opt_called = True  # torch's schedulers warn where step() was not called, as it is not here

    # ---- rank checks ----------------------------------------------------------------------------------------------

    def _ended(self, *, applied: bool, factor: float) -> None:
        if self._session is not None:
            self._session.count(applied=applied, factor=factor)
            self._look_is_due = True

    def _look(self) -> None:
        """At a part of what the last step has published, before the next one begins or somebody writes."""
        if self._look_is_due and self._session is not None:
            self._look_is_due = False
            self._opened().deliver()
            self._session.look()

    def _check_ranks(self) -> None:
        """At the end of ``step()``. On demand, the look waits until forward has gathered what it needs."""
        if self._session is None or not self._look_is_due:
            return
        if self._session.full_check_is_due:
            self._look()
            self._session.check_everything()
        elif not self._later:
            self._look()

    def _stock_norm(self, window: Window) -> Tensor:
        """DeepSpeed's own: per parameter, per sub-group, in fp32; infinite where it would skip the step."""
        driver = self._opened()
        if self.dtype == torch.float16:
            self.inf_or_nan_tracker.fill_(not math.isfinite(window.sum_of_squares))
            self._check_overflow()
            if self.overflow:
                return torch.tensor(math.inf)
        for param in self._trained():
            partition = driver.partitions[param.ds_id]
            if partition.arrivals and partition.shard.numel:
                self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(partition.gradient)
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in self._get_norm_groups()])
        if bool((~torch.isfinite(norms) | (norms < 0)).any()):
            return torch.tensor(math.inf)
        combined: Tensor = torch.linalg.vector_norm(norms)
        return combined

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Known from packing; DeepSpeed would read the whole gradient buffer twice more."""
        flag = self.inf_or_nan_tracker.to(get_accelerator().current_device_name()).to(torch.uint8)
        self.inf_or_nan_tracker.zero_()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        return bool(flag.item())

    def _clip(self, norm: Tensor, scale: float) -> tuple[float, float]:
        """Clip coefficient and gradient factor by DeepSpeed's formula, in the precision of ``norm``."""
        if not self.clip_grad > 0.0:
            return 1.0, 1.0 / scale
        clip = torch.clamp((norm / scale + 1e-6) / self.clip_grad, min=1.0)
        return float(1.0 / clip), float(1.0 / (clip * scale))

    def _show_steps(self) -> None:
        for flat, steps in zip(self.fp32_partitioned_groups_flat, self._opened().steps, strict=True):
            self.optimizer.state[flat]["step"] = self._step_value(steps)

    def _post_step(self, timer_names: Any = ()) -> None:
        """Persistent parameters are gathered by their next reader, where they may not be there yet."""
        persistent: Any = getattr(self, "persistent_parameters")  # noqa: B009
        if self._later:
            self.persistent_parameters = []
        else:
            gather_together(persistent)
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent

    # ---- who reads and writes parameters, masters, moments and gradients -----------------------------------------

    def _opened(self) -> PartitionDriver:
        if self._driver is None:
            raise StateError("this optimizer was destroyed; make a new engine with deepspeed.initialize()")
        return self._driver

    def _before_gather(self, params: list[Any]) -> None:
        if self._driver is not None:
            with self._for_the_next_step():
                self._driver.deliver([param.ds_id for param in params])

    def _after_update(self, params: list[Any]) -> None:
        """``GatheredParameters(..., modifier_rank=...)`` wrote parameters: the masters follow."""
        if self._driver is not None:
            self._look_is_due = False
            for param in params:
                self._driver.take_over(param.ds_id)

    def synchronize(self) -> None:
        """Returns once nothing runs: parameters, masters and moments are those of the last finished step."""
        self._await_gradients()
        with held_signals():
            self._opened().core.quiesce()

    @contextmanager
    def _settled(self) -> Iterator[None]:
        self.synchronize()
        yield

    def _gradient_slice(self, param: Any, *, write: bool) -> Tensor:
        """The accumulated gradient's partition, padding included, as DeepSpeed's readers expect it."""
        self._await_gradients()
        partition = self._opened().partitions[param.ds_id]
        if write:
            self._opened().let_go(partition)
            partition.arrivals = max(1, partition.arrivals)
            partition.written = True
        return partition.padded

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Copies in fp32, by sub-group and place in it."""
        return {
            sub_group: {i: self._gradient_slice(param, write=False).float() for i, param in enumerate(params)}
            for sub_group, params in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[Tensor, int]:
        sub_group = self.grad_position[self.get_param_id(param)][0]
        if release_swap_buffers:  # only to be read
            return self._gradient_slice(param, write=False).float().clone(), sub_group
        return self._gradient_slice(param, write=True), sub_group

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[Any]) -> None:
        """As DeepSpeed's, on the accumulated gradient."""
        for param in param_list:
            if param.requires_grad:
                new = update_func(self.get_fp32_grad_for_param(param), param)
                self.set_fp32_grad_for_param(new, param)

    def _get_fp32_opt_state_partition(self, param: Any, *args: Any, **kwargs: Any) -> Any:
        self._await_gradients()
        self._look()
        self._opened().settle(param.ds_id)
        return super()._get_fp32_opt_state_partition(param, *args, **kwargs)

    def _restore_from_bit16_weights(self) -> None:
        with self._settled():
            super()._restore_from_bit16_weights()

    def checkpoint_event_prologue(self) -> None:
        with self._settled():
            super().checkpoint_event_prologue()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are in host memory as they are; what moves is fresh."""
        with self._settled():
            super().offload_states(*args, **kwargs)

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's layout, as after the last finished step, also between backward and ``step()``."""
        with self._settled():
            state: dict[str, Any] = super().state_dict()
            return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Ours and stock ZeRO-3's, also universal ones. A window in flight is abandoned."""
        self.zero_grad()
        with self._settled():
            mine = [dict(self.optimizer.state[flat]) for flat in self.fp32_partitioned_groups_flat]
            super().load_state_dict(*args, **kwargs)
            self._take_loaded_state(mine)

    def _take_loaded_state(self, mine: list[dict[str, Any]]) -> None:
        """DeepSpeed replaces moment tensors; the shards point into ours, so the values move there."""
        steps = []
        for flat, own in zip(self.fp32_partitioned_groups_flat, mine, strict=True):
            loaded = self.optimizer.state[flat]
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in loaded:  # a stock checkpoint of before the first step has no state
                    own[name].zero_()
                elif loaded[name] is not own[name]:
                    own[name].copy_(loaded[name])
                loaded[name] = own[name]
            steps.append(int(loaded.get("step", 0)))
        self._opened().set_steps(steps)
        self._show_steps()
        if self._session is not None:
            self._session.loaded(max(steps))
            self._look_is_due = False

    # ---- figures and the end --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """Totals of this rank since construction (superoffload/stats.py)."""
        return self._opened().core.stats()

    def state_digests(self) -> dict[str, str]:
        """SHA-256 of this rank's masters, moments and published partitions, as after the last finished step."""
        self.synchronize()
        return self._opened().core.digests()

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads; parameters and state stay readable."""
        driver, self._driver = self._driver, None
        if self._readers is not None:
            self._readers.close()
            self._readers = None
        self._arriving.clear()
        self._session, self._look_is_due = None, False
        _OPEN.discard(self)
        if driver is not None:
            driver.close()

    def __iter__(self) -> Iterator[Any]:
        """What torch.distributed.checkpoint tries with something that is no torch.optim.Optimizer."""
        raise StateError("DeepSpeed's optimizer is no torch.optim.Optimizer; use engine.save_checkpoint()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; use engine.save_checkpoint()")

    def destroy(self) -> None:
        """As DeepSpeed's, and ends what is ours."""
        self.close()
        super().destroy()

    def __del__(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None:  # let go of without destroy(): nobody can read what was speculated any more
            driver.core.pool.close()
