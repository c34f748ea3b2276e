"""What a rank does once: gloo, a quiet DeepSpeed. Loaded before ranks are forked, with what they would load."""

from __future__ import annotations

import functools
import gc
import logging
import warnings
from datetime import timedelta

import cpuinfo
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from superoffload.integrations.deepspeed import partitions as integration
from tests.support.deepspeed.quick_kernels.sitecustomize import install

install()  # before the first of its kernels is compiled

# DeepSpeed collects garbage whenever it makes an engine; there is none among what was imported.
gc.collect()
gc.freeze()


def start(timeout: float) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logger.setLevel(logging.ERROR)
    # DeepSpeed refuses fp16 on processors, where it is slow; the arithmetic is there, and loss scaling needs it.
    get_accelerator().is_fp16_supported = lambda: True
    # DeepSpeed asks for the processor whenever it makes its own Adam, which takes over a second each time.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed asked before `install()` changed it
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=timeout))
    # On demand must be tested on demand, also on a machine with one processor.
    vars(integration)["is_crowded"] = lambda ranks: False
