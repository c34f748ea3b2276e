#!/usr/bin/env bash
# Checks that one build runs on every CPU of its architecture: no object file has an instruction of a set but the set's
# own file, and no such file has a function that the linker might choose for the others (a weak definition, as of inline
# functions) or that runs when the library is loaded (a static initializer).
#
# usage: check_isolation.sh MACHINE OBJECT...
set -euo pipefail
machine=$1 bad=0
shift

case $machine in
    x86_64) prefix="" beyond='%[yz]mm|[[:space:]]v[a-z0-9]+ .*%xmm|%k[0-7]' ;;
    aarch64) prefix=aarch64-linux-gnu- beyond='[[:space:],{]z[0-9]+\.[bhsd]|[[:space:]]p[0-9]+[./]' ;;
    *) echo "no instruction sets beyond the baseline on $machine"; exit 0 ;;
esac
[ "$machine" = "$(uname -m)" ] && prefix=""

fail() { echo "$1" >&2; bad=1; }

checked=0
for object in "$@"; do
    checked=$((checked + 1))
    case $(basename "$object") in
        isa_scalar.o | isa_neon.o) own=no ;;
        isa_*) own=yes ;;
        *) own=no ;;
    esac
    if [ "$own" = no ]; then
        found=$("${prefix}objdump" -d --no-show-raw-insn "$object" | grep -Ec "$beyond" || true)
        [ "$found" -eq 0 ] || fail "$object: $found instructions that not every $machine CPU has"
    else
        found=$("${prefix}objdump" -d --no-show-raw-insn "$object" | grep -Ec "$beyond" || true)
        [ "$found" -gt 100 ] || fail "$object: only $found instructions of its set; is this check still looking right?"
        weak=$("${prefix}nm" -C "$object" | grep -E ' [WVu] ' || true)
        [ -z "$weak" ] || fail "$object: the linker may use these for other files: $weak"
        if "${prefix}objdump" -h "$object" | grep -Eq '\.init_array|\.ctors'; then
            fail "$object: has a static initializer, which runs on CPUs without its instructions"
        fi
    fi
done

[ "$checked" -gt 3 ] || fail "only $checked object files to check"
[ "$bad" -eq 0 ] && echo "$checked object files of $machine: every instruction set stays in its own file"
exit "$bad"
