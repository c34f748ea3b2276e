"""From DeepSpeed's flat buffers to shards, and the state that these point into."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from superoffload.bucket import Shard
from superoffload.engine.engine import EngineOptions
from superoffload.errors import StateError
from superoffload.integrations.deepspeed import residency
from superoffload.integrations.deepspeed.config import Options
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver
from superoffload.integrations.deepspeed.features import hyper_of
from superoffload.integrations.deepspeed.ranks import cpus_of_this_rank
from superoffload.link import Link
from superoffload.memory import host_zeros


class Shards(DeepSpeedZeroOptimizer_Stage3):
    """Every parameter's partition on this rank as a shard of the core."""

    superoffload_options: Options
    _driver: PartitionDriver | None = None
    _crowded = False  # more ranks than processors: nothing is left for later, where it would be in the way

    def initialize_optimizer_states(self) -> None:
        """No fp32 gradient per sub-group: the kernel reads the accumulated one. State is made with the shards."""

    def _trained(self) -> Iterator[Any]:
        for group in self.fp16_groups:
            yield from group

    def _opened(self) -> PartitionDriver:
        if self._driver is None:
            raise StateError("this optimizer was destroyed; make a new engine with deepspeed.initialize()")
        return self._driver

    def _make_driver(self) -> PartitionDriver:
        resident = residency.resident_sub_groups(self.subgroup_to_device)
        accelerator = self._accelerator_link(resident)
        self._make_moments(resident)
        partitions = self._make_partitions(resident)
        options = self.superoffload_options
        cpus, self._crowded = cpus_of_this_rank(
            options.threads, self.fp16_partitioned_groups_flat, self.dp_process_group, options.rank_timeout
        )
        reference = weakref.ref(self.optimizer)  # an engine that is let go of must not keep itself alive
        return PartitionDriver(
            partitions,
            len(self.fp16_groups),
            EngineOptions(options.speculation, options.bucket_numel, cpus),
            lambda group: hyper_of(reference(), group),
            pin=any(flat.device.type != "cpu" for flat in self.fp16_partitioned_groups_flat),
            accelerator=accelerator,
        )

    def _make_partitions(self, resident: frozenset[int]) -> list[Partition]:
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
        return partitions

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

    def _show_steps(self) -> None:
        for flat, steps in zip(self.fp32_partitioned_groups_flat, self._opened().steps, strict=True):
            self.optimizer.state[flat]["step"] = self._step_value(steps)
