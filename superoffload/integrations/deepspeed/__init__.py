"""Runs superoffload behind DeepSpeed ZeRO's ``offload_optimizer``: one line in the script, none in the model.

    import superoffload.integrations.deepspeed
    superoffload.integrations.deepspeed.enable()

After ``enable()``, ``"offload_optimizer": {"device": "superoffload"}`` and ``{"device": "cpu", "super_offload": true}``
select our backend wherever DeepSpeed reads its config. docs/deepspeed.md has the options and what is refused.
"""

from __future__ import annotations

from superoffload.integrations.deepspeed.switch import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled"]
