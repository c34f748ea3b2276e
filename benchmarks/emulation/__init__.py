"""Emulates an accelerator by a clock under the real engine and schedule: in virtual time or beside real work.

In virtual time only the clock advances, so a training step of any size is timed in milliseconds. The seeded simulator
(tests/simulator) uses it. In wall-clock time layers and copies sleep, and the processors do their real work.
"""
