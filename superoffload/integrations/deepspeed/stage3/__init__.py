"""DeepSpeed's ZeRO-3 optimizer with its optimizer part replaced by the core. The only folder with DeepSpeed's names.

Sharding, collectives, hooks, accumulation rules and loss scaling stay DeepSpeed's. Ours: where gradients go when they
were reduced (``partition_grads``), the end of a step (``step``), and who waits for it (readers of state). One layer a
file, each built on the one before: shards, agreement, gradients, verdicts, steps, saved_state, optimizer.
"""

from superoffload.integrations.deepspeed.stage3.optimizer import SpeculativeStage3

__all__ = ["SpeculativeStage3"]
