"""A slow, plain reference of everything the kernels and the optimizer compute, in NumPy alone.

It is written from the arithmetic in the documentation and shares no code with the extension: where both agree bit for
bit, two independent readings of the definition agree. One idea per module:

* ``fma``         one correctly rounded fp32 fused multiply-add
* ``convert``     fp32, fp16 and bf16 into each other; a master into its two halves
* ``stochastic``  the rounding of bf16 moments
* ``adam``        one optimizer step over arrays, the norm blocks, their fold and the verdict
* ``journal``     which lanes of a speculated step must go to an escape list
* ``trainer``     a whole synchronous optimizer: per-parameter step counts, clipping, skipping
"""
