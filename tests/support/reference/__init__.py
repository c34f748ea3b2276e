"""A slow, plain reference of everything the kernels and the optimizer compute, in NumPy alone.

It is written from the arithmetic in the documentation and shares no code with the extension: where both agree bit for
bit, two independent readings of the definition agree.
"""
