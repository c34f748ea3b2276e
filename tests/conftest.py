"""What all tests share: Hypothesis profiles and the reason why tests marked `gpu` are skipped."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

# Before torch is loaded: its OpenMP threads would otherwise spin on the cores that worker threads need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# torch.compile would start processes that load torch, to compile a handful of small functions.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# A shell starts programs in the background with Ctrl-C ignored; the tests that send it would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:  # the kernel tests also run where only NumPy is installed
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    settings = None  # type: ignore[assignment,misc]

# Timings on shared machines say nothing about a test, so no deadlines; pytest-timeout catches hangs. CI does not write
# its examples anywhere, so it prints how to repeat a failure.
if settings is not None:
    settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("ci", settings.get_profile("default"), print_blob=True, database=None)
    settings.load_profile("ci" if os.environ.get("CI") == "true" else "default")


def missing_for_gpu() -> str | None:
    """Why tests marked `gpu` cannot run here; None where they can."""
    if importlib.util.find_spec("torch") is None:
        return "needs torch: pip install torch"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device that torch sees (torch.cuda.is_available())"


def is_its_turn(item: pytest.Item, turn: str) -> bool:
    """Whether a test runs in this ``turn``, "1/4" say, or "none": all do but those marked ``in_turn``."""
    mark = item.get_closest_marker("in_turn")
    if turn == "none":
        return mark is None
    number, _, turns = turn.partition("/")
    group = mark.args[0] if mark is not None and mark.args else item.nodeid
    return mark is None or zlib.crc32(group.encode()) % int(turns) == int(number) - 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.support.over_stand_in import is_wanted

    items[:] = [item for item in items if is_wanted(item)]
    turn = os.environ.get("TEST_TURN", "1/1")
    if re.fullmatch(r"none|[1-9]\d*/[1-9]\d*", turn) is None:
        raise pytest.UsageError(f"TEST_TURN={turn}: expected a turn and their number, such as 1/4, or none; 1/1: all")
    for item in items:
        if not is_its_turn(item, turn):
            item.add_marker(
                pytest.mark.skip(reason=f"needs TEST_TURN=1/1, or the turn it is drawn for; TEST_TURN is {turn}")
            )
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_for_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def _memory_goes_with_its_file() -> Iterator[None]:
    """Ends the processes that tests of a file share: those of all files together need more memory than there may be."""
    yield
    for kept in ("rank_processes", "quick_python"):
        tools = sys.modules.get(f"tests.support.{kept}")
        if tools is not None:
            tools.close_all()


@pytest.fixture(autouse=True)
def torch_threads_as_before() -> Iterator[None]:
    """Lightning sets how many threads torch has, and sums of the tests behind it would have other bits."""
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_window_of_accelerate_left_open() -> Iterator[None]:
    """A window of micro-batches that an error ended stays open in its process, and AdamW waits for its end."""
    yield
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.GradientState._shared_state:
        accelerate.GradientState()._set_sync_gradients(True)


@pytest.fixture
def refusal(request: pytest.FixtureRequest) -> Any:
    """Checks an error against the test's marks ``refused``."""
    from tests.support.refusal import Refusal

    return Refusal([mark.args[0] for mark in request.node.iter_markers("refused")])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from tests.support.over_stand_in import LINKS

    if metafunc.definition.get_closest_marker("over_stand_in"):
        metafunc.parametrize("link_below", LINKS, indirect=True)


@pytest.fixture(autouse=True)
def link_below(request: pytest.FixtureRequest) -> Iterator[str]:
    """Puts the CUDA link over the fake driver below the test's optimizers, in its second run."""
    from tests.support.over_stand_in import below, is_over_stand_in

    if not is_over_stand_in(request.node):
        yield "host"
        return
    with below(request.node, request.getfixturevalue("fake")):
        yield "stand-in"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    from tests.support.over_stand_in import check_used

    result = yield
    check_used(pyfuncitem)
    return result


@pytest.fixture(scope="session")
def _fake_driver() -> Any:
    from tests.support.fake_cuda import Fake

    return Fake()


@pytest.fixture
def fake(_fake_driver: Any) -> Iterator[Any]:
    """The fake CUDA driver (tests.support.fake_cuda.Fake), as new; whatever a test has broken or left running."""
    _fake_driver.reset()
    yield _fake_driver
    _fake_driver.reset()
    _fake_driver.finish()
