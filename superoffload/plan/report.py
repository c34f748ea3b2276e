"""What `superoffload plan` says, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superoffload.plan.explanations import AutoPlacement, auto_placement, journal_lines, placement_lines
from superoffload.plan.hardware import GB, Hardware
from superoffload.plan.memory import CONTEXT_BYTES, FRAGMENTATION, HOST_RESERVE, Settings, estimate_memory
from superoffload.plan.models import ModelShape
from superoffload.plan.settings import Choice, all_choices, configuration, evaluate, largest_model, recommend
from superoffload.plan.step_time import ZERO3_SECONDS_PER_LAYER

NOT_YET = (
    "The CUDA link of this version has not been run on a GPU yet, so GPU rows are what the model expects, not what was "
    "measured."
)


def assumptions(settings: Settings) -> list[str]:
    return [
        f"{settings.utilization:.0%} of the GPU's bf16 peak in forward and backward (--utilization)",
        "bf16 parameters and gradients; activations of an eager Llama-like block with a fused attention kernel",
        f"{FRAGMENTATION:.0%} of GPU memory and {CONTEXT_BYTES / GB:g} GB kept for fragmentation and CUDA context",
        f"{HOST_RESERVE / GB:g} GB of the host's memory kept for the system, Python and data loading",
        f"ZeRO hides no collectives, stage 3 adds {1e3 * ZERO3_SECONDS_PER_LAYER:g} ms per layer; FSDP2 prefetches",
        "bandwidths only, no latencies; 64 equal buckets; eager delivery; copies do not slow the processors further",
        f"{settings.clip_rate:.0%} of the steps clip (--clip-rate)",
    ]


def plan_as_json(model: ModelShape, hardware: Hardware, settings: Settings) -> dict[str, Any]:
    choice, best = evaluate(model, hardware, settings), recommend(model, hardware, settings)
    needs = estimate_memory(model, settings)
    largest = largest_model(hardware, settings)
    auto = _auto(model, hardware, choice)
    return {
        "command": "plan",
        "passed": choice.fit.fits,
        "model": {**vars(model), "parameters": model.parameters},
        "hardware": {**vars(hardware), "sources": dict(hardware.sources)},
        "settings": vars(settings),
        "memory": {
            "gpu": needs.gpu,
            "gpu_moments": needs.gpu_moments,
            "gpu_peak": needs.gpu_peak,
            "host": needs.host,
            "host_peak": needs.host_peak,
            **choice.fit.as_json(),
        },
        "step": {**choice.step.as_json(), "tokens_per_second": choice.tokens_per_second},
        "placement_auto": None if auto is None else auto.as_json(),
        "largest_model_parameters": largest.parameters if largest else None,
        "recommended": None if best is None else {**_choice_json(best), "configuration": configuration(best.settings)},
        "choices": [_choice_json(other) for other in all_choices(model, hardware, settings)],
        "configuration": configuration(settings),
        "assumptions": assumptions(settings),
        "note": NOT_YET,
    }


def _auto(model: ModelShape, hardware: Hardware, choice: Choice) -> AutoPlacement | None:
    return auto_placement(model, choice.settings, choice.fit, choice.step, hardware.host_bandwidth)


def _choice_json(choice: Choice) -> dict[str, Any]:
    return {
        "settings": vars(choice.settings),
        "fits": choice.fit.fits,
        "binds": choice.fit.binds,
        "step_seconds": choice.step.total,
        "tokens_per_second": choice.tokens_per_second,
    }


def plan_as_text(model: ModelShape, hardware: Hardware, settings: Settings) -> str:
    choice = evaluate(model, hardware, settings)
    parts = [
        f"{model.parameters / 1e9:.2f} B parameters ({model.layers} layers, hidden {model.hidden}, ffn {model.ffn}, "
        f"vocabulary {model.vocabulary}) on {settings.ranks} x {hardware.name}",
        f"{_name(settings)}, {settings.tokens_per_step} tokens per rank and step",
        "",
        *_memory_lines(model, settings, choice),
        "",
        *_step_lines(choice),
        *placement_lines(_auto(model, hardware, choice)),
        "",
        *_choice_lines(model, hardware, settings),
        "",
        "Assumptions",
        *(f"  - {text}" for text in assumptions(settings)),
        "Hardware",
        *(f"  - {name}: {_amount(name, getattr(hardware, name))}: {text}" for name, text in hardware.sources.items()),
        "",
        NOT_YET,
    ]
    return "\n".join(parts)


def _amount(name: str, value: float) -> str:
    if name == "flops":
        return f"{value / 1e12:.0f} TFLOP/s"
    return f"{value / GB:.0f} GB" + ("" if name.endswith("memory") else "/s")


def _name(settings: Settings) -> str:
    sharding = "" if settings.sharding == "none" else f" with {settings.sharding}"
    checkpointing = ", checkpointing" if settings.checkpointing == "full" else ""
    return f"{settings.engine}{sharding}{checkpointing}"


def _memory_lines(model: ModelShape, settings: Settings, choice: Choice) -> list[str]:
    needs, fit = estimate_memory(model, settings), choice.fit
    lines = [f"Memory per GPU: {needs.gpu_peak / GB:.1f} GB of {fit.gpu_room / GB:.1f} usable"]
    lines += [f"  {name:<32} {size / GB:>8.1f} GB" for name, size in needs.gpu.items()]
    worst = needs.worst_moment
    lines += [
        f"  {'at ' + name:<32} {size / GB:>8.1f} GB{'  <- the peak' if name == worst else ''}"
        for name, size in needs.gpu_moments.items()
    ]
    if needs.host:
        lines.append(f"Host memory per GPU: {needs.host_peak / GB:.1f} GB of {fit.host_room / GB:.1f} usable")
        lines += [f"  {name:<32} {size / GB:>8.1f} GB" for name, size in needs.host.items()]
        lines += journal_lines(model, settings, needs)
    lines.append(f"{'It fits' if fit.fits else 'It does not fit'}; {fit.binds} is the tighter one.")
    return lines


def _step_lines(choice: Choice) -> list[str]:
    step = choice.step
    return [
        f"Step, predicted: {step.total:.3f} s, {choice.tokens_per_second:,.0f} tokens/s over all ranks",
        f"  forward {step.forward:.3f} s, backward {step.backward:.3f} s, collectives exposed {step.collectives:.3f} s",
        f"  optimizer and its copies {step.optimizer:.3f} s: hidden behind backward or each other "
        f"{step.optimizer_hidden:.3f} s, "
        f"exposed {step.optimizer_exposed:.3f} s",
    ]


def _choice_lines(model: ModelShape, hardware: Hardware, settings: Settings) -> list[str]:
    best, largest = recommend(model, hardware, settings), largest_model(hardware, settings)
    size = f"{largest.parameters / 1e9:.1f} B parameters" if largest else "not even one of 10 M parameters"
    lines = [f"Largest model with these settings: {size}"]
    if best is None:
        return [*lines, "Nothing that is planned here fits: use more ranks, or a smaller model, sequence or batch."]
    lines.append(f"Recommended: {_name(best.settings)}, {best.tokens_per_second:,.0f} tokens/s")
    lines += [f"  {line}" for line in configuration(best.settings).splitlines()]
    return lines


def comparison_table(choices: Sequence[Choice]) -> list[str]:
    """All combinations, the fastest first."""
    lines = [f"{'engine':<46} {'fits':<6} {'GPU, GB':>8} {'host, GB':>9} {'step, s':>9} {'tokens/s':>10}"]
    for choice in choices:
        fit = choice.fit
        lines.append(
            f"{_name(choice.settings):<46} {'yes' if fit.fits else 'no':<6} {fit.gpu_need / GB:>8.1f} "
            f"{fit.host_need / GB:>9.1f} {choice.step.total:>9.3f} {choice.tokens_per_second:>10,.0f}"
        )
    return lines
