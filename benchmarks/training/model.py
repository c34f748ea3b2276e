"""Implements a small decoder-only transformer: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.

It has the shape of today's language models at a size that two CPU cores can train in a minute. It is plain PyTorch:
nothing in it knows the optimizer, so `superoffload.AdamW` works on an ordinary model.

Parameters and their gradients have one dtype, activations may have another: a layer reads its weight in the dtype of
its input. With bf16 parameters a CPU without bf16 arithmetic computes in fp32, several times faster than it would
emulate bf16, and the optimizer sees the same bf16 parameters and gradients as elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.config import ModelConfig

_ROTARY_BASE = 10_000.0

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def native_bf16() -> bool:
    """Returns whether this CPU multiplies bf16 in hardware; a torch that cannot tell counts as no."""
    report: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(report.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def compute_dtype(parameters: torch.dtype) -> torch.dtype:
    """Returns the dtype of activations that suits this CPU."""
    return parameters if parameters != torch.bfloat16 or native_bf16() else torch.float32


class Linear(nn.Module):
    """Multiplies by a matrix without bias, read in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Scales to unit root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


def rotary_tables(sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of every (position, pair) angle, each [sequence, width // 2], in fp32."""
    frequency = _ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(sequence, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + width/2]) of [batch, heads, sequence, width] by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Computes causal attention in which groups of query heads share one key/value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.head_width
        self.qkv = Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.width)
        self.out = Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        packed = self.qkv(x).view(batch, sequence, -1, self.width).transpose(1, 2)
        query, key, value = packed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return result


class SwiGLU(nn.Module):
    """Computes the gated feed-forward layer down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden, 2 * config.mlp)
        self.down = Linear(config.mlp, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


class Block(nn.Module):
    """Computes one transformer layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Transformer(nn.Module):
    """Maps tokens (bytes, unless the vocabulary is larger) to logits of the next ones."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.compute = config, compute
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        self.head = Linear(config.hidden, config.vocabulary)
        cos, sin = rotary_tables(config.sequence, config.head_width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialize()

    def set_rotary_tables(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def _initialize(self) -> None:
        """Draws from Normal(0, 0.02); scales down the two matrices that write to the residual stream by its depth."""
        residual_scale = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            writes_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(parameter, std=0.02 * (residual_scale if writes_residual else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        sequence = tokens.shape[1]
        x = self.embedding(tokens).to(self.compute)
        cos, sin = self.cos[:sequence].to(x.dtype), self.sin[:sequence].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Returns mean cross-entropy of the next token in nats over [batch, sequence + 1] tokens, computed in fp32."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def build_model(config: ModelConfig, dtype: torch.dtype, compute: torch.dtype, seed: int) -> Transformer:
    """Returns the model with weights drawn from `seed` alone in fp32 and parameters rounded to `dtype`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config, compute)
    # Parameters only: the rotary tables stay fp32 and are rounded where they are used.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def decayed_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns two param groups: matrices, which decay, and the others."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
