"""DeepSpeed's ZeRO-3 optimizer with its optimizer part replaced by the engine. The only folder with DeepSpeed's names.

Sharding, collectives, hooks, accumulation rules and loss scaling stay DeepSpeed's. Ours: where gradients go when they
were reduced (``partition_grads``), the end of a step (``step``), and who waits for it (readers of state).
``SpeculativeStage3`` forwards what DeepSpeed calls to the parts that it owns (assembly.py).
"""

from superoffload.integrations.deepspeed.stage3.optimizer import SpeculativeStage3

__all__ = ["SpeculativeStage3"]
