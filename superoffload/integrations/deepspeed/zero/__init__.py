"""Replaces the optimizer part of DeepSpeed's ZeRO by the engine. Only this folder uses its names.

Sharding, collectives, hooks, accumulation rules and loss scaling stay DeepSpeed's. Ours are the place of reduced
gradients, the end of a step, and the waits of readers of state. Stages differ in where final gradients come from and
where parameters go (``stage1_and_2.py``, ``stage3.py``); all else is one for both (``parts.py`` puts it together).
"""
