"""`SignalWatch` delivers signals to a thread, and the program's own handlers keep working."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from alspec.runtime.faults.signals import SignalWatch


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    """SIGTERM and SIGUSR1 have their default handlers at the start of each test."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert signal.set_wakeup_fd(-1) == -1


def test_sigterm_is_delivered_and_its_default_handler_comes_back() -> None:
    watch = SignalWatch(takes_sigterm=True)
    assert watch.wait(0) == set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert watch.wait(1) == {signal.SIGTERM}
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_the_program_stay_and_are_called() -> None:
    calls = []

    def handle(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR1, handle)
    watch = SignalWatch(takes_sigterm=True)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    assert calls == [signal.SIGTERM, signal.SIGUSR1]
    assert signal.SIGTERM not in watch.wait(1)
    later = SignalWatch(takes_sigterm=True)  # closed in the order of creation
    watch.close()
    later.close()
    assert signal.getsignal(signal.SIGTERM) is handle
    signal.set_wakeup_fd(-1)


def test_asyncio_still_gets_its_signals() -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, arrived.set)
        watch = SignalWatch()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.wait(1) == {signal.SIGUSR1}
        await asyncio.wait_for(arrived.wait(), 5)
        watch.close()
        arrived.clear()
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(arrived.wait(), 5)
        loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(program())


def test_a_wakeup_descriptor_that_was_set_later_stays() -> None:
    watch = SignalWatch()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    watch.close()
    assert signal.set_wakeup_fd(-1) == writing
    os.close(reading)
    os.close(writing)


def test_a_watch_created_in_another_thread_changes_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    watches: list[SignalWatch] = []
    thread = threading.Thread(target=lambda: watches.append(SignalWatch(takes_sigterm=True)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    watches[0].close()


def test_after_close_in_another_thread_signals_work_as_before() -> None:
    """asyncio gets its signals, and SIGTERM ends the process."""
    program = """
import asyncio, os, signal
from alspec.runtime.faults.signals import SignalWatch
async def program():
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, arrived.set)
    await asyncio.to_thread(SignalWatch(takes_sigterm=True).close)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(arrived.wait(), 5)
    print("arrived", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(5)
asyncio.run(program())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "arrived\n"), done.stderr


def test_a_forked_child_has_its_own_signals() -> None:
    """`multiprocessing` ends its workers with SIGTERM."""
    watch = SignalWatch(takes_sigterm=True)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b".")
        time.sleep(5)
        os._exit(0)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert watch.wait(0) == set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert watch.wait(1) == {signal.SIGTERM}
    watch.close()


def test_signals_are_delivered_with_more_than_a_thousand_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 1200:
        pytest.skip("this process may not open that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    with contextlib.ExitStack() as files:
        for _ in range(1024):
            files.enter_context(open(os.devnull, "rb"))
        watch = SignalWatch(takes_sigterm=True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.wait(1) == {signal.SIGTERM}
        watch.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
