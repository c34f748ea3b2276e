"""Describes decoder-only transformers by their sizes: number of parameters, and arithmetic per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.host.untrusted import read_json, shown

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_LARGEST_SIZE = 1 << 40  # of any size of a model; their products stay far below the largest float
# The first name that a config.json has counts; the older ones are GPT-2's.
_CONFIG_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True)
class ModelShape:
    """Holds a model's sizes; `ffn` is a feed-forward layer's inner width; `gated` ones (SwiGLU) have three matrices.

    With experts, every layer has `experts` feed-forward layers, of which a token uses `experts_used`.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_width: int | None = None
    tied: bool = False
    gated: bool = True
    experts: int = 1
    experts_used: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "experts", "experts_used"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
                raise ArgumentError(f"{name}={shown(value)}: expected a whole number of at least 1")
        width = self.head_width
        if width is not None and (type(width) is not int or not 1 <= width <= _LARGEST_SIZE):
            raise ArgumentError(f"head_width={shown(width)}: expected a whole number of at least 1, or None")
        if self.experts_used > self.experts:
            raise ArgumentError(f"experts_used={self.experts_used}: more than the {self.experts} experts there are")

    @property
    def attention_width(self) -> int:
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * (self.head_width or self.hidden // self.heads)

    @property
    def embedding_parameters(self) -> int:
        """Counts input embedding and output head; if they are tied, one matrix."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters(self.experts) + self.hidden + self.embedding_parameters

    @property
    def multiplied_parameters(self) -> int:
        """Counts the parameters that a token is multiplied with: no input embedding, and only the experts it uses."""
        return self.layers * self.layer_parameters(self.experts_used) + self.vocabulary * self.hidden

    def layer_parameters(self, experts: int) -> int:
        """Counts the parameters of one layer with this many experts."""
        attention = 2 * self.hidden * (self.attention_width + self.kv_width)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + experts * (3 if self.gated else 2) * self.hidden * self.ffn + router + 2 * self.hidden

    def flops_per_token(self, sequence: int) -> float:
        """Counts forward and backward: 6 per parameter, and causal attention over half the sequence on average."""
        return 6.0 * self.multiplied_parameters + 6.0 * self.layers * self.attention_width * sequence


def swiglu_width(hidden: int, multiple_of: int = 1024) -> int:
    """Returns the inner width by Llama's rule: two thirds of 4 x hidden, times the multiplier, rounded up."""
    width = int(1.3 * int(2 * 4 * hidden / 3))
    return multiple_of * math.ceil(width / multiple_of)


def parse_parameter_count(text: str) -> float:
    """Parses `7B`, `350M` or a plain number."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit != 1 else text
    try:
        count = float(digits) * unit
    except ValueError:
        count = math.nan
    if not (math.isfinite(count) and count >= 1e5):
        raise ArgumentError(
            f"model={text}: expected a parameter count such as 7B or 350M, or the path of a Hugging Face config.json"
        )
    return count


def typical_shape(parameters: float) -> ModelShape:
    """Returns a decoder of about that many parameters in usual proportions: 128 hidden per layer, heads of 128.

    A small model gets a small vocabulary, which would otherwise be most of it.
    """
    vocabulary = max(256, min(128_000, int(parameters * 0.25 / 512)))
    best: ModelShape | None = None
    for hidden in range(64, 1 << 16, 64):
        heads = max(1, hidden // 128)
        kv_heads = next(count for count in (8, 4, 2, 1) if heads % count == 0)
        shape = ModelShape(1, hidden, heads, kv_heads, swiglu_width(hidden, 64), vocabulary)
        per_layer = shape.layers * shape.layer_parameters(1)
        layers = round((parameters - shape.embedding_parameters) / per_layer)
        if layers < 1:
            break
        shape = replace(shape, layers=layers)
        if best is None or abs(layers - hidden / 128) < abs(best.layers - best.hidden / 128):
            best = shape
    assert best is not None
    return best


def read_config(path: str | Path) -> ModelShape:
    """Reads a Hugging Face `config.json` of a decoder-only transformer."""
    try:
        values = read_json(path)
    except OSError as error:
        raise ArgumentError(f"model={path}: cannot be read ({error.strerror}); name a config.json") from error
    except ArgumentError as error:
        raise ArgumentError(f"model={path}: {error}; name a Hugging Face config.json") from error
    if not isinstance(values, dict):
        raise ArgumentError(f"model={path}: expected a JSON object such as a Hugging Face config.json has")
    try:
        return shape_from_config({**values, **values.get("text_config", {})}, str(path))
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"model={path}: not the sizes of a model ({error}); name a Hugging Face config.json"
        ) from error


def shape_from_config(values: Mapping[str, Any], source: str) -> ModelShape:
    sizes = {}
    for name, keys in _CONFIG_NAMES.items():
        known = [values[key] for key in keys if isinstance(values.get(key), int)]
        if not known:
            raise ArgumentError(f"model={source}: has none of {', '.join(keys)}; expected a decoder-only transformer")
        sizes[name] = known[0]
    experts = int(values.get("num_local_experts") or values.get("num_experts") or values.get("n_routed_experts") or 1)
    ffn = values.get("moe_intermediate_size") if experts > 1 else None
    ffn = ffn or values.get("intermediate_size") or values.get("n_inner") or 4 * sizes["hidden"]
    gpt2 = "n_embd" in values
    return ModelShape(
        **sizes,
        kv_heads=values.get("num_key_value_heads") or sizes["heads"],
        ffn=int(ffn),
        head_width=values.get("head_dim"),
        tied=bool(values.get("tie_word_embeddings", gpt2)),
        gated=not gpt2 and values.get("hidden_act", "silu") in ("silu", "swish", "swiglu", "gelu_pytorch_tanh"),
        experts=experts,
        experts_used=int(values.get("num_experts_per_tok") or 1) if experts > 1 else 1,
    )
