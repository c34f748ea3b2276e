#!/usr/bin/env bash
# Takes files with lines "digest ISA HEX" and fails unless all lines of all files show the same digest.
set -euo pipefail
grep -H . "$@"
lines=$(cat "$@" | wc -l)
different=$(cat "$@" | awk '{ print $3 }' | sort -u | wc -l)
if [ "$lines" -lt 2 ] || [ "$different" -ne 1 ] || cat "$@" | grep -Evq '^digest [a-z0-9]+ [0-9a-f]{16}$'; then
    echo "$lines digests, $different of them different: the instruction sets do not give one result" >&2
    exit 1
fi
echo "$lines digests, all equal"
