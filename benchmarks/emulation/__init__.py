"""An accelerator made of a clock, under the real core and the real schedule: in virtual time or beside real work.

Virtual: nothing takes time but the clock, so a training step of any size is timed in milliseconds. The seeded simulator
(tests/simulator, in a checkout) is built on it. Wall-clock: layers and copies are slept, the processors do their work.
"""
