"""Starts torchtitan's own train.py on processors: its Trainer, models and checkpoints, over gloo.

    torchrun --nproc-per-node 2 examples/torchtitan/on_cpus.py --module text_models --config llama \
        --override.imports superoffload.integrations.torchtitan.offload superoffload.integrations.torchtitan.metrics

torchtitan 0.3.0 is written for GPUs and for a nightly torch. ``prepare()`` changes what keeps it from processors; none
of it is needed on GPUs, where ``torchtitan.train`` takes the same arguments.
"""

import sys
from pathlib import Path

from superoffload.integrations.torchtitan_on_cpus import prepare

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where text_models is
    prepare()
    from torchtitan.train import main

    main()
