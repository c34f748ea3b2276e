"""The transformer that `train` and `verify` use, its sizes, and the learning rate schedule."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from superoffload.errors import ArgumentError
from superoffload.tools.train.model import Transformer, build_model, compute_dtype, rotary_tables, rotate
from superoffload.tools.train.trainer import learning_rate_factor
from superoffload.tools.train.training_config import ModelConfig, TrainingConfig

TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, mlp=48, sequence=16)


def tiny(
    config: ModelConfig = TINY, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None
) -> Transformer:
    return build_model(config, dtype, compute or dtype, seed=5)


def tokens(batch: int = 2, length: int = 17) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_default_model_has_about_two_million_parameters() -> None:
    assert 1.8e6 < tiny(ModelConfig()).parameter_count() < 2.4e6


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    assert tiny().loss(tokens(8)).item() == pytest.approx(math.log(256), abs=0.1)


def test_no_position_sees_a_later_one() -> None:
    model, text = tiny(), tokens(1)[:, :-1]
    changed = text.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.allclose(before[0, :9], after[0, :9], atol=1e-6)
    assert not torch.allclose(before[0, 9:], after[0, 9:], atol=1e-3)


def test_attention_tells_positions_apart() -> None:
    """Without rotary embeddings a single layer would see the same text whatever the order before the last byte."""
    model = tiny(dataclasses.replace(TINY, layers=1))
    one, other = torch.tensor([[1, 2, 3, 4, 9]]), torch.tensor([[3, 1, 4, 2, 9]])
    # One layer at the start of training mixes little, so enlarge what attention writes.
    with torch.no_grad():
        model.blocks[0].attention.out.weight.mul_(100)  # type: ignore[union-attr,operator]
    assert not torch.allclose(model(one)[0, -1], model(other)[0, -1], atol=1e-4)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = rotary_tables(32, 8)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    rotated_query = rotate(query.expand(1, 1, 32, 8), cos, sin)[0, 0]
    rotated_key = rotate(key.expand(1, 1, 32, 8), cos, sin)[0, 0]
    assert torch.allclose(rotated_query.norm(dim=-1), query.norm().expand(32), rtol=1e-5)
    scores = rotated_query @ rotated_key.T
    assert torch.allclose(scores[5, 3], scores[25, 23], atol=1e-4)
    assert not torch.allclose(scores[5, 3], scores[5, 4], atol=1e-3)


def test_grouped_query_attention_is_full_attention_with_shared_heads() -> None:
    grouped = tiny(dataclasses.replace(TINY, kv_heads=1))
    full = tiny(dataclasses.replace(TINY, kv_heads=4))
    state = grouped.state_dict()
    width = TINY.head_width
    for name in [name for name in state if name.endswith("qkv.weight")]:
        query, key, value = state[name].split((4 * width, width, width))
        state[name] = torch.cat((query, key.repeat(4, 1), value.repeat(4, 1)))
    full.load_state_dict(state)
    text = tokens()[:, :-1]
    assert torch.allclose(grouped(text), full(text), atol=1e-5)


def test_tied_embeddings_are_one_parameter() -> None:
    untied, tied = tiny(), tiny(dataclasses.replace(TINY, tied=True))
    assert untied.parameter_count() - tied.parameter_count() == 256 * TINY.hidden
    assert tied.head.weight is tied.embedding.weight


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = tiny().state_dict()
    before = torch.get_rng_state()
    second = tiny().state_dict()
    assert torch.equal(before, torch.get_rng_state()), "building a model must not touch the global generator"
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_model(TINY, torch.float32, torch.float32, seed=6).state_dict()
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_the_parameters(compute: torch.dtype) -> None:
    model = tiny(dtype=torch.bfloat16, compute=compute)
    model.loss(tokens()).backward()
    assert model(tokens()[:, :-1]).dtype == compute
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    assert all(p.grad is not None for p in model.parameters())


def test_fp32_compute_of_bf16_parameters_is_exactly_the_fp32_model_of_these_values() -> None:
    rounded = tiny(dtype=torch.bfloat16, compute=torch.float32)
    widened = tiny()
    widened.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
    assert torch.equal(rounded(tokens()[:, :-1]), widened(tokens()[:, :-1]))


def test_auto_compute_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("superoffload.tools.train.model.native_bf16", lambda native=native: native)
        assert compute_dtype(torch.bfloat16, "auto") == expected
        assert compute_dtype(torch.float32, "auto") == torch.float32
        assert compute_dtype(torch.bfloat16, "bf16") == torch.bfloat16


@pytest.mark.parametrize("tied, first, last", [(False, "head", "embedding"), (True, "norm", "embedding")])
def test_gradients_come_in_the_order_that_injection_relies_on(tied: bool, first: str, last: str) -> None:
    model = tiny(dataclasses.replace(TINY, tied=tied))
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model.loss(tokens()).backward()
    assert order[0] == f"{first}.weight" and order[-1] == f"{last}.weight"


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"hidden": 30, "heads": 4}, "hidden=30 is not divisible by heads=4"),
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not divisible by kv_heads=3"),
        ({"hidden": 12, "heads": 4, "kv_heads": 2}, "width 3"),
        ({"layers": 0}, "layers=0"),
        ({"mlp": -1}, "mlp=-1"),
        ({"sequence": 0}, "sequence=0"),
    ],
)
def test_impossible_sizes_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ModelConfig(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": math.inf}, "lr=inf"),
        ({"steps": 0}, "steps=0"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"warmup": 30, "steps": 20}, "warmup=30"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"threads": 0}, "threads=0"),
        ({"seed": -1}, "seed=-1"),
        ({"dtype": "fp8"}, "dtype=fp8"),
        ({"speculation": "maybe"}, "speculation=maybe"),
    ],
)
def test_impossible_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TrainingConfig(**values)  # type: ignore[arg-type]


def test_learning_rate_rises_linearly_and_falls_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, warmup=4, steps=20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[4:]))
    assert factors[20] == pytest.approx(0.1)
