"""Emulates an accelerator by a clock under the real engine and schedule.

Only the clock advances, so a training step of any size is timed in milliseconds. The seeded simulator (tests/simulator)
uses it.
"""
