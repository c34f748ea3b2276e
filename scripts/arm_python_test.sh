#!/usr/bin/env bash
# The extension on ARM without an ARM machine: cross-builds it, lets an emulated aarch64 Python with NumPy import it, and
# runs the kernel tests that need no torch, with SVE vectors of 128 bits.
#
#   scripts/arm_python_test.sh             # of these sources
#   scripts/arm_python_test.sh ARM.whl     # of a wheel that `make wheels` has made
#
# The ARM Python comes from Debian's arm64 packages (about 40 MB), unpacked into build/arm-python without installing
# anything and kept there for the next run. About 5 minutes on 2 idle cores; it gives up, and fails, after 20.
#
# Needs g++-aarch64-linux-gnu, qemu-user-static, apt-get, dpkg-deb, Debian's archive keyring and network for the packages;
# where they cannot be had it prints a line beginning with SKIPPED and exits with status 75. Variables: PYTHON, an
# interpreter with setuptools and Cython; SUPEROFFLOAD_DEBIAN, another mirror than deb.debian.org.
set -euo pipefail

if [ -z "${ARM_PYTHON_TEST_BOUNDED:-}" ]; then
    ARM_PYTHON_TEST_BOUNDED=1 exec timeout --kill-after=10 1200 "$0" "$@"
fi

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$repository/build/arm-python
mirror=${SUPEROFFLOAD_DEBIAN:-http://deb.debian.org/debian}
suite=trixie
packages=(python3 python3-numpy python3-pytest python3-pytest-timeout python3-hypothesis libpython3-dev)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
tests=(tests/kernels/test_kernels.py tests/kernels/test_journal.py tests/kernels/test_float_environment.py)

skip() {
    echo "SKIPPED: THE EXTENSION WAS NOT TRIED UNDER AN ARM PYTHON: $1"
    exit 75
}

check_tools() {
    local tool
    [ "$(uname -m)" != aarch64 ] || skip "this machine is one; its own test suite does that"
    for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get dpkg-deb; do
        command -v "$tool" >/dev/null || skip "there is no $tool (Debian: g++-aarch64-linux-gnu, qemu-user-static)"
    done
    [ -r "$keyring" ] || skip "there is no $keyring to check packages with (Debian, Ubuntu: debian-archive-keyring)"
    python=${PYTHON:-$repository/.venv/bin/python}
    [ -x "$(command -v "$python")" ] || python=python3
    if ! "$python" -c 'import Cython, setuptools'; then
        echo "$python cannot build the extension: it lacks Cython or setuptools. Name another one: PYTHON=..." >&2
        exit 1
    fi
}

# apt with a configuration, package lists and a cache of its own; it knows nothing of this machine's packages.
private_apt() {
    timeout "$1" apt-get -qq \
        -o Dir::State::status="$work/apt/status" -o Dir::State::lists="$work/apt/lists" \
        -o Dir::Cache::archives="$work/apt/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
        -o Dir::Etc::sourcelist="$work/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::Etc::preferencesparts=/dev/null -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1 \
        -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Acquire::Languages=none "${@:2}"
}

# The packages unpacked, one over the other: enough for a Python that is only run, never administered.
fetch_root() {
    local wanted="$suite ${packages[*]}" package
    [ "$(cat "$work/root/.packages" 2>/dev/null)" != "$wanted" ] || return 0
    rm -rf "$work/apt" "$work/root"
    mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$work/root/usr/lib" "$work/root/usr/bin"
    : >"$work/apt/status"
    echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/apt/sources.list"
    private_apt 120 update || skip "the list of Debian's arm64 packages could not be fetched from $mirror"
    private_apt 300 install -y --no-install-recommends --download-only "${packages[@]}" >"$work/apt/log" 2>&1 || {
        tail -n 5 "$work/apt/log"
        skip "Debian's arm64 packages could not be fetched from $mirror"
    }
    ln -s usr/lib "$work/root/lib"
    for package in "$work"/apt/archives/*.deb; do dpkg-deb -x "$package" "$work/root"; done
    rm -rf "$work/apt"
    echo "$wanted" >"$work/root/.packages"
}

# A command that is an ARM Python. Pointer authentication is off: emulating it takes most of the time otherwise.
write_python() {
    arm_python=$(readlink "$work/root/usr/bin/python3")
    local libraries=$work/root/usr/lib/aarch64-linux-gnu
    cat >"$work/python" <<END
#!/bin/sh
exec qemu-aarch64-static -cpu "max,pauth=off,sve-default-vector-length=\${SVE_BYTES:-16}" -L '$work/root' -0 '$work/python' \\
    -E PYTHONHOME='$work/root/usr' -E LD_LIBRARY_PATH='$libraries/blas:$libraries/lapack' \\
    '$work/root/usr/bin/$arm_python' "\$@"
END
    chmod +x "$work/python"
}

# The package, its tests and the cross-built extension side by side, away from this machine's own build.
build_stage() {
    local include=$work/include
    rm -rf "$work/stage" "$include"
    mkdir -p "$work/stage" "$include/aarch64-linux-gnu"
    if [ -n "$wheel" ]; then
        "$python" -m zipfile -e "$wheel" "$work/stage"
        cp -r "$repository/tests" "$repository/pyproject.toml" "$work/stage/"
        return
    fi
    # Python's headers alone: the C library's are the cross compiler's.
    cp -r "$work/root/usr/include/$arm_python" "$include/"
    cp -r "$work/root/usr/include/aarch64-linux-gnu/$arm_python" "$include/aarch64-linux-gnu/"
    cp -r "$repository/superoffload" "$repository/tests" "$repository/pyproject.toml" "$work/stage/"
    rm -f "$work"/stage/superoffload/_native*.so
    (cd "$repository" && SUPEROFFLOAD_TARGET=aarch64 SUPEROFFLOAD_BUILD_DIR=$work/objects CFLAGS=-g0 \
        CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ \
        "$python" setup.py --quiet build_ext --include-dirs "$include:$include/$arm_python" \
        --build-lib "$work/stage" --build-temp "$work/objects")
}

# The tests once, as Neoverse V2 would run them, once it is certain that the vectors are as long as Grace's. The battery with
# its recorded digests calls every kernel on every type and many lengths; `make arm-test` runs another on NEON and longer
# vectors, and every length, without Python. (Whether the reference still gives those digests is no matter of ARM.)
run_tests() {
    export SUPEROFFLOAD_ISA=sve SVE_BYTES=16
    cd "$work/stage"
    "$work/python" -B -c "
import ctypes, platform, numpy
from superoffload import kernels
length = ctypes.CDLL(None).prctl(51) & 0xffff  # PR_SVE_GET_VL
print(f'{platform.machine()} Python {platform.python_version()}, NumPy {numpy.__version__}:',
      f'{kernels.current_isa()} of {kernels.available_isas()}, SVE vectors of {8 * length} bits', flush=True)
assert (platform.machine(), kernels.current_isa(), length) == ('aarch64', 'sve', $SVE_BYTES)"
    "$work/python" -B -m pytest -q -p no:cacheprovider --durations=3 -o timeout=900 \
        "${tests[@]}" -k "sve or not (neon or scalar or recorded)"
}

wheel=${1:+$(realpath "$1")}
check_tools
mkdir -p "$work"
fetch_root
write_python
build_stage
run_tests
