"""Programs in interpreters that have loaded torch already: forked from one that loaded it once.

A program is ``__main__`` of a process with one thread, and its interpreter ends as any other; what differs from one
that was started anew is that the modules named here are in ``sys.modules``. What they read from the environment when
they are loaded (OMP_NUM_THREADS) is the server's, so that a server has one environment.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

_START = "from tests.support import quick_python as q; p = q.serve({socket}, {preload}); exec(*q.program(p, globals()))"


class QuickPython:
    """``run([...])`` is ``subprocess.run([sys.executable, ...], capture_output=True, text=True)``."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._preload, self._environment = list(preload), dict(environment)
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(
        self, command: Sequence[str], *, cwd: str | None = None, timeout: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """``command``: a script or ``-c`` and a program, and arguments."""
        said, waits = os.pipe()
        with (
            tempfile.TemporaryFile("w+") as request,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
            open(said) as status,
        ):
            json.dump([list(command), cwd or os.getcwd()], request)
            request.flush()
            with self._lock:
                if self._server is None:
                    self._start()
                files = [request.fileno(), out.fileno(), err.fileno(), waits]
                socket.send_fds(self._socket, [b"r"], files)
            os.close(waits)
            child = int(status.readline())
            if not select.select([status], [], [], timeout)[0]:
                os.kill(child, signal.SIGKILL)
                for written in (out, err):
                    written.seek(0)
                raise AssertionError(f"not done after {timeout} s; it wrote {out.read()!r} and to stderr: {err.read()}")
            code = int(status.readline())
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(list(command), code, out.read(), err.read())

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = _START.format(socket=theirs.fileno(), preload=self._preload)
        self._server = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=self._environment
        )
        theirs.close()

    def close(self) -> None:
        if self._server is not None:
            self._socket.close()
            self._server.wait(30)
            self._server = None


# ---- in the server ------------------------------------------------------------------------------------------------


def serve(number: int, preload: list[str]) -> list[str]:
    """Returns in every program's process, with what it is to run."""
    requests = socket.socket(fileno=number)
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a program's collections do not copy what all share
    while True:
        _, files, _, _ = socket.recv_fds(requests, 1, 4)
        if not files:
            os._exit(0)
        keeper = os.fork()
        if keeper == 0:
            requests.close()
            return _keep(*files)
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(request: int, out: int, err: int, status: int) -> list[str]:
    """Waits for the program's process and says how it ended; returns in that process."""
    child = os.fork()
    if child:
        os.write(status, f"{child}\n".encode())
        _, how = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):  # the test has given up
            os.write(status, f"{os.waitstatus_to_exitcode(how)}\n".encode())
        os._exit(0)
    os.close(status)
    with open(request, "rb") as file:
        file.seek(0)
        command, cwd = json.loads(file.read())
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(cwd)
    return list(command)


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
    with open(command[0], encoding="utf-8") as file:
        return compile(file.read(), command[0], "exec"), namespace
