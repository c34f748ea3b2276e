"""Loaded last by the process that ranks are forked from: no rank's garbage collection copies what all of them share."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
