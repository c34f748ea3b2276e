"""Programs in interpreters that have loaded torch already: forked from one that loaded it once.

A program is ``__main__`` of a process with one thread, and its interpreter ends as any other; what differs from one
that was started anew is that the modules named here are in ``sys.modules``. What they read from the environment when
they are loaded (OMP_NUM_THREADS) is the server's, so that a server has one environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_all: list[QuickPython] = []
_START = "from tests.support import quick_python as q; exec(*q.program(q.serve({preload}), globals()))"


class QuickPython:
    """``run([...])`` is ``subprocess.run([sys.executable, ...], capture_output=True, text=True)``; threads that call it
    at the same time have a server each."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-c", _START.format(preload=list(preload))]
        self._environment = dict(environment)
        self._idle: list[subprocess.Popen[str]] = []
        _all.append(self)

    def run(
        self, command: Sequence[str], *, cwd: str | None = None, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """``command``: a script or ``-c`` and a program, and arguments."""
        try:
            server = self._idle.pop()
        except IndexError:
            server = self._start()
        assert server.stdin is not None and server.stdout is not None
        with tempfile.TemporaryDirectory(prefix="superoffload-python-") as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request = [list(command), cwd or os.getcwd(), str(out), str(err), timeout]
            print(json.dumps(request), file=server.stdin, flush=True)
            code, late = json.loads(server.stdout.readline())
            self._idle.append(server)
            said = out.read_text(), err.read_text()
            assert not late, f"not done after {timeout} s; it wrote {said[0]!r} and to stderr: {said[1]}"
            return subprocess.CompletedProcess(list(command), code, *said)

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, env=self._environment)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().communicate(timeout=30)


def close_all() -> None:
    """Ends the servers; a program that comes later starts another."""
    for one in _all:
        one.close()


# ---- in the server ------------------------------------------------------------------------------------------------


def serve(preload: list[str]) -> list[str]:
    """Returns in every program's process, with what it is to run."""
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a program's collections do not copy what all share
    for line in sys.stdin:
        command, cwd, out, err, timeout = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, path in enumerate((os.devnull, out, err)):
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                os.dup2(file, number)
                os.close(file)
            os.chdir(cwd)
            return list(command)
        ends, late = time.monotonic() + timeout, False
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > ends and not late:
                late = True
                os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
        os.write(1, f"{json.dumps([os.waitstatus_to_exitcode(ended[1]), late])}\n".encode())
    os._exit(0)


def program(command: list[str], namespace: dict[str, object]) -> tuple[object, dict[str, object]]:
    """Code and namespace of what is run as ``__main__``."""
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[0] = ""
        return compile(command[1], "<string>", "exec"), namespace
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    namespace["__file__"] = os.path.abspath(command[0])
    return compile(Path(command[0]).read_text(encoding="utf-8"), command[0], "exec"), namespace
