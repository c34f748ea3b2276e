#!/usr/bin/env python3
"""Computes how many cycles one parameter costs a Neoverse V2 core, by static analysis, for Grace.

One pass of the optimizer is bound by memory if the cores compute faster than memory delivers. Grace has 72 cores at
3.1 GHz and about 450 GB/s, a step moves 28 bytes per parameter: that leaves each core about 14 cycles per parameter.
With bf16 moments and split masters it moves 18, which leaves 9; with 8-bit moments and split masters 14: that leaves 7.
This script compiles the SVE and NEON loops (loops.cpp: AdamW, bf16 gradient, bf16 shadow, one-byte codes) with the
extension's own flags, tuned for neoverse-v2, cuts the loop bodies out of the assembly, and lets llvm-mca count.

What the numbers are: steady state, all data in the first-level cache, every branch predicted. llvm-mca knows
neither caches nor escapes' data dependencies. The branch into an escape list is rare (about one parameter in a
hundred escapes), so the figure held against the budget is the iteration in which nothing escapes: the shortest way
around the loop. The last column is the longest way of a journaled step, in which every vector escapes in all three
components.
Replay undoes and steps a vector while it is in registers: two square roots and two divisions.
8-bit moments are stepped in two passes over a block of 256, the first for its scale, and replay has three; a row's
figures are the sums of its passes. What happens once a block is left out. Their journaled step and replay need more
than memory leaves them (ALLOWED): there the cores decide, on paper.

Exit status: 0 if every loop is within the budget, 1 if not. Without the tools it prints a line beginning with SKIPPED
and exits 0, or 77 with --require.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CPU = "neoverse-v2"
LANES_PER_VECTOR = 4  # fp32 elements: NEON, and SVE as Neoverse V2 has it (128 bits)
MACHINE = {"cores": 72, "ghz": 3.1, "memory_gb_per_s": 450.0}
LOOPS = ("step", ESCAPING := "step_journaled", "undo", "replay", "publish")
# Settings of moments and masters: the macros of loops.cpp, and the bytes per parameter that a step moves.
STATES = {"fp32": ("f32", "false", 28), "split": ("f32", "true", 26), "bf16": ("bf16", "false", 20),
          "bf16+split": ("bf16", "true", 18), "q8": ("q8", "false", 16), "q8+split": ("q8", "true", 14)}  # fmt: skip
# Loops are found by an instruction; how many of it each vector takes. A first pass over 8-bit moments finds two maxima,
# and has no square root. PASSES: how many loops of 8-bit moments have it.
PER_VECTOR = {"umax": 2, "fsqrt": 1}
ONE_PASS = {"fsqrt": 1}
PASSES = {name: {"umax": 1, "fsqrt": 2 if name == "replay" else 1} for name in LOOPS} | {"undo": ONE_PASS}
SQUARE_ROOTS = {"replay": 2}  # per vector of replay in one pass; the others take one
# The shares of the budget that rows may take where it is not 1.
ALLOWED = {("q8", "step_journaled"): 1.5, ("q8+split", "step_journaled"): 1.65,
           ("q8", "replay"): 1.6, ("q8+split", "replay"): 1.85}  # fmt: skip
ITERATIONS = 1000
CONDITIONS = "eq|ne|cs|hs|cc|lo|mi|pl|vs|vc|hi|ls|ge|lt|gt|le|none|any|nlast|last|first|nfrst|pmore|tcont|tstop"
BRANCH = re.compile(rf"b|b\.?({CONDITIONS})|cbn?z|tbn?z")
LEAVES = ("ret", "br")
MISSING = 77  # the customary status of a check that could not be made


class ToolsMissing(Exception):
    """Says what to install if the analysis cannot be done here."""


@dataclass(frozen=True)
class Block:
    """Represents a basic block: its instructions, and the blocks that may follow."""

    instructions: list[str]
    successors: list[int]


def budget(state: str = "fp32") -> float:
    """Returns cycles per parameter and core while memory delivers the bytes of one parameter to every core."""
    return MACHINE["cores"] * MACHINE["ghz"] * STATES[state][2] / MACHINE["memory_gb_per_s"]


def find_tool(name: str, package: str) -> str:
    """Returns the newest installed one of the versioned names, or the plain one."""
    for candidate in (*(f"{name}-{version}" for version in range(24, 16, -1)), name):
        found = shutil.which(candidate)
        if found:
            return found
    raise ToolsMissing(f"there is no {name} or {name}-19 on the path (Debian, Ubuntu: apt install {package})")


def run(command: list[str], text: str | None = None) -> str:
    """Returns the standard output of a command that must succeed."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout


def find_tools() -> tuple[list[str], str]:
    """Returns the compiler and llvm-mca, after trying both: an old one may not know the processor."""
    command = [find_tool("clang++", "clang-19"), "--target=aarch64-linux-gnu", f"-mtune={CPU}"]
    mca = find_tool("llvm-mca", "llvm-19")
    probe = "#include <arm_sve.h>\n#include <cstring>\n#include <type_traits>\n"
    try:
        run([*command, "-x", "c++", "-march=armv8.2-a+sve", "-fsyntax-only", "-"], probe)
    except (RuntimeError, OSError) as error:
        hint = "it needs AArch64's C++ headers (Debian, Ubuntu: apt install g++-aarch64-linux-gnu)"
        raise ToolsMissing(f"{shlex.join(command)} cannot compile for AArch64; {hint}.\n{error}") from error
    try:
        count_cycles(mca, ["fsqrt z0.s, p0/m, z1.s"])
    except RuntimeError as error:
        raise ToolsMissing(f"{mca} does not know {CPU}; LLVM 17 or newer does.\n{error}") from error
    return command, mca


def isa_flags(isa: str) -> list[str]:
    """Returns the flags that csrc/flags.txt gives the kernels of an instruction set."""
    flags: list[str] = []
    for line in (ROOT / "csrc" / "flags.txt").read_text().splitlines():
        words = line.split("#", 1)[0].split()
        if words[:1] == ["common"]:
            flags += words[1:]
        elif words[:2] == ["isa", isa]:
            flags += words[3:]
    return [flag for flag in flags if flag != "-pthread"]


def compile_loops(compiler: list[str], isa: str, state: str) -> str:
    """Returns the assembly of loops.cpp for the lanes of `isa` and one of STATES."""
    moments, split, _ = STATES[state]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "loops.s")
        macros = [f"-DGRACE_LANES={isa.capitalize()}Lanes", f"-DGRACE_MOMENTS={moments}", f"-DGRACE_SPLIT={split}"]
        flags = [*isa_flags(isa), "-I", str(ROOT / "csrc"), *macros, "-S"]
        run([*compiler, *flags, str(HERE / "loops.cpp"), "-o", str(output)])
        return output.read_text()


def function_lines(assembly: str, name: str) -> list[str]:
    """Returns labels and instructions of one function, without comments and directives."""
    found = re.search(rf"^{name}:(.*?)^\s*\.size\s+{name},", assembly, re.MULTILINE | re.DOTALL)
    if not found:
        raise RuntimeError(f"the assembly has no function {name}")
    lines = (line.split("//", 1)[0].strip() for line in found.group(1).splitlines())
    return [line for line in lines if line.endswith(":") or (line and not line.startswith((".", "#")))]


def basic_blocks(lines: list[str]) -> list[Block]:
    """Returns the function as a graph: a block ends before a label and after a branch."""
    texts: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in lines:
        if line.endswith(":"):
            if texts[-1]:
                texts.append([])
            labels[line[:-1]] = len(texts) - 1
            continue
        texts[-1].append(line)
        if BRANCH.fullmatch(line.split()[0]) or line.split()[0] in LEAVES:
            texts.append([])
    blocks = []
    for i, text in enumerate(texts):
        last = text[-1].split() if text else [""]
        successors = [labels[last[-1]]] if BRANCH.fullmatch(last[0]) else []
        if last[0] not in ("b", *LEAVES) and i + 1 < len(texts):
            successors.append(i + 1)
        blocks.append(Block(text, successors))
    return blocks


def reach(edges: list[list[int]], start: int, without: int) -> set[int]:
    """Returns the blocks that one leads to, itself too, if another is taken out."""
    found: set[int] = set()
    following = [start]
    while following:
        at = following.pop()
        if at != without and at not in found:
            found.add(at)
            following += edges[at]
    return found


def loops_of(blocks: list[Block]) -> dict[int, set[int]]:
    """Returns each loop's blocks, by the block that it is entered by: it is on every way to those that lead back."""
    after = [block.successors for block in blocks]
    before = [[other for other in range(len(blocks)) if at in after[other]] for at in range(len(blocks))]
    found = {}
    for entry in range(len(blocks)):
        back = set(before[entry]) - reach(after, 0, without=entry)
        if back:
            found[entry] = {entry}.union(*(reach(before, at, without=entry) for at in back))
    return found


def iterations(blocks: list[Block], inside: set[int], way: list[int]) -> Iterator[list[str]]:
    """Yields the instructions of every way around a loop that passes no block twice; `way`: the loop's entry."""
    for following in blocks[way[-1]].successors:
        if following == way[0]:
            yield [line for at in way for line in blocks[at].instructions]
        elif following in inside and following not in way:
            yield from iterations(blocks, inside, [*way, following])


def count(instruction: str, lines: list[str]) -> int:
    """Counts an instruction."""
    return sum(line.split()[0] == instruction for line in lines)


Loop = tuple[list[str], list[str]]  # shortest and longest iteration: nothing escapes, everything escapes


def loop_bodies(assembly: str, name: str, marks: dict[str, int]) -> dict[str, list[Loop]]:
    """Returns the hot loops by the instruction that marks them; `marks` says how many there must be."""
    blocks = basic_blocks(function_lines(assembly, f"grace_{name}"))
    loops = loops_of(blocks)
    ways = {entry: [*iterations(blocks, inside, [entry])] for entry, inside in loops.items()}
    found: dict[str, list[Loop]] = {}
    for mark, expected in marks.items():
        marked = {entry: [way for way in around if count(mark, way)] for entry, around in ways.items()}
        has_root = {entry: any(count("fsqrt", way) for way in around) for entry, around in marked.items()}
        hot = {entry: around for entry, around in marked.items() if around and has_root[entry] == (mark == "fsqrt")}
        inner = [around for entry, around in hot.items() if not any(loops[entry] > loops[other] for other in hot)]
        if len(inner) != expected:
            raise RuntimeError(f"expected {expected} loops with {mark} in {name}, found {len(inner)}; unrolled?")
        found[mark] = [(min(around, key=len), max(around, key=len)) for around in inner]
    return found


def split_addressing(instructions: list[str]) -> list[str]:
    """Splits accesses that also move their pointer into an access and an addition, as the processor does.

    llvm-mca takes them for one operation: the next iteration's addresses would wait for the data that this one stores,
    and a loop bound by throughput would seem to be bound by latency.
    """
    split: list[str] = []
    for line in instructions:
        moved = re.fullmatch(r"(.*\[(\w+)\]),\s*(#-?\d+)", line) or re.fullmatch(r"(.*\[(\w+)), (#-?\d+)\]!", line)
        if moved is None:
            split.append(line)
            continue
        access, base, distance = moved.groups()
        addition = f"add {base}, {base}, {distance}"
        split += [access, addition] if access.endswith("]") else [addition, f"{access}]"]
    return split


def count_cycles(mca: str, instructions: list[str]) -> float:
    """Returns cycles per iteration of a loop with this body, by llvm-mca."""
    options = ["-mtriple=aarch64", f"-mcpu={CPU}", f"-iterations={ITERATIONS}", "-json"]
    text = "\n".join(split_addressing(instructions)) + "\n"
    report: dict[str, Any] = json.loads(run([mca, *options, "-"], text))
    summary = report["CodeRegions"][0]["SummaryView"]
    return float(summary["TotalCycles"]) / ITERATIONS


def analyse(compiler: list[str], mca: str, isa: str, state: str) -> list[Row]:
    """Returns the rows of one instruction set and state. A vector holds four parameters; a loop may be unrolled."""
    assembly = compile_loops(compiler, isa, state)
    two_passes = STATES[state][0] == "q8"
    rows = []
    for name in LOOPS:
        instructions, cycles, all_escape = 0.0, 0.0, 0.0  # per parameter
        for mark, loops in loop_bodies(assembly, name, PASSES[name] if two_passes else ONE_PASS).items():
            per_vector = PER_VECTOR[mark] if two_passes else SQUARE_ROOTS.get(name, 1)
            for usual, worst in loops:
                params = count(mark, usual) * LANES_PER_VECTOR / per_vector
                instructions += len(usual) / params
                cycles += count_cycles(mca, usual) / params
                if name == ESCAPING:
                    all_escape += count_cycles(mca, worst) / params
        row = {"name": name, "isa": isa, "state": state, "instructions_per_param": instructions}
        row |= {"cycles_per_param": cycles, "cycles_per_param_all_escape": all_escape or None}
        row |= {"of_budget": cycles / budget(state), "gb_per_s_per_core": MACHINE["ghz"] * STATES[state][2] / cycles}
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    """Returns the report as text."""
    lines = [f"{'isa':5} {'state':10} {'loop':15} {'instr/param':>11} {'cycles/param':>12} "
             f"{'of budget':>9} {'GB/s/core':>9} {'all escape':>10}"]  # fmt: skip
    for row in rows:
        escape = f"{row['cycles_per_param_all_escape']:.2f}" if row["name"] == ESCAPING else "-"
        lines.append(
            f"{row['isa']:5} {row['state']:10} {row['name']:15} {row['instructions_per_param']:11.2f} "
            f"{row['cycles_per_param']:12.2f} {row['of_budget']:9.1%} {row['gb_per_s_per_core']:9.1f} {escape:>10}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the analysis; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report as JSON")
    parser.add_argument("--require", action="store_true", help=f"exit with {MISSING} where the tools are missing")
    arguments = parser.parse_args(argv)
    try:
        tools = find_tools()
    except ToolsMissing as reason:
        print(f"SKIPPED: cycles per parameter on {CPU} were not checked: {reason}")
        return MISSING if arguments.require else 0
    rows = [row for isa in ("sve", "neon") for state in STATES for row in analyse(*tools, isa, state)]
    over = [row for row in rows if row["of_budget"] > ALLOWED.get((row["state"], row["name"]), 1)]
    print(f"{run([tools[0][0], '--version']).splitlines()[0]}; {CPU}\n{table(rows)}")
    for state, (*_, moved) in STATES.items():
        print(f"budget of {state}: {budget(state):.2f} cycles per parameter = {MACHINE['cores']} cores x "
              f"{MACHINE['ghz']} GHz x {moved} bytes / {MACHINE['memory_gb_per_s']:.0f} GB/s")  # fmt: skip
    for row in over:
        print(f"OVER BUDGET: {row['isa']} {row['state']} {row['name']}: {row['cycles_per_param']:.2f} cycles")
    if arguments.json:
        limit = {"cycles_per_param": budget(), "by_state": {state: budget(state) for state in STATES}}
        report = {"machine": {"cpu": CPU, **MACHINE}, "limit": limit, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
