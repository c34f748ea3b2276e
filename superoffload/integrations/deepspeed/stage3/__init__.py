"""Replaces the optimizer part of DeepSpeed's ZeRO-3 by the engine. Only this folder uses its names.

Sharding, collectives, hooks, accumulation rules and loss scaling stay DeepSpeed's. Ours are the place of reduced
gradients (``partition_grads``), the end of a step (``step``), and the waits of readers of state. ``SpeculativeStage3``
forwards what DeepSpeed calls to the parts that it owns (optimizer.py).
"""

from superoffload.integrations.deepspeed.stage3.optimizer import SpeculativeStage3

__all__ = ["SpeculativeStage3"]
