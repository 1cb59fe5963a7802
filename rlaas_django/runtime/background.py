"""The background thread of a process, and the jobs that it runs once a second.

Whoever needs a job registers it. The thread starts with the first recorded request, so
a forked worker starts its own. Where threads do not run (uWSGI without
--enable-threads), a request that finds the thread stalled runs some of the jobs itself.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from django.db import connections

from . import log, process

# Seconds between two rounds. Changes are promised within a second, of which a round
# takes a part.
INTERVAL = 0.8
STALLED_AFTER = 5.0  # seconds without a round
EXIT_TIMEOUT = 2.0  # seconds that a process waits at its end for a round in progress


@dataclass(frozen=True)
class Job:
    """A function that each round calls, and when else it is called."""

    function: Callable[[], object]
    ignored: type[Exception] | tuple[()]
    at_start: bool
    when_stalled: bool
    at_exit: bool

    def run(self) -> None:
        """Call the function; an error is logged, and fails no request and no other job."""
        try:
            self.function()
        except self.ignored:
            pass
        except Exception as error:  # noqa: BLE001
            module = self.function.__module__.rpartition(".")[2]
            name = f"{module}.{self.function.__name__}"
            log.error("Background job %s failed: %s", name, log.escaped(repr(error)))


class State:
    """The thread of this process, and when it last ran."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over.

        A fork does not inherit the thread, and a thread of the parent may have held
        the locks.
        """
        self.start_lock = threading.Lock()
        self.round_lock = threading.Lock()
        # Compared on each request: a server written in C may fork without Python's hooks.
        self.pid: int | None = None
        self.thread: threading.Thread | None = None
        self.last_round = 0.0


jobs: dict[Callable[[], object], Job] = {}  # in the order in which they run
state = State()
process.on_fork(state.reset)


def register(
    function: Callable[[], object],
    *,
    ignored: type[Exception] | tuple[()] = (),
    at_start: bool = False,
    when_stalled: bool = False,
    at_exit: bool = False,
) -> None:
    """Have a function called in each round.

    It is also called as soon as the thread starts, by a request where the thread has
    stalled, and at the end of the process, as asked for. Errors that are `ignored` have
    been logged where they were raised.
    """
    jobs[function] = Job(function, ignored, at_start, when_stalled, at_exit)


def wake() -> None:
    """Start the thread if this process has none; stand in for it if it has stalled."""
    if state.pid != os.getpid():
        _start()
    elif time.monotonic() - state.last_round > STALLED_AFTER and not _in_event_loop():
        _run_round(job for job in jobs.values() if job.when_stalled)


def run(wait: float = 0) -> None:
    """Run a round now; while one is in progress, wait up to `wait` seconds, then skip."""
    _run_round(jobs.values(), wait)


def _run_round(chosen: Iterable[Job], wait: float = 0) -> None:
    lock = state.round_lock
    if not lock.acquire(timeout=wait):
        return

    try:
        for job in [*chosen]:
            job.run()
    finally:
        state.last_round = time.monotonic()
        lock.release()


def _in_event_loop() -> bool:
    """Return whether this thread has an event loop, which a round would block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _start() -> None:
    with state.start_lock:
        if state.pid == os.getpid():
            return

        state.pid = os.getpid()
        state.last_round = time.monotonic()
        # As late as possible: what is registered last runs first, before any teardown.
        atexit.unregister(_run_last_jobs)
        atexit.register(_run_last_jobs)

        state.thread = threading.Thread(target=_loop, name="rlaas_django", daemon=True)
        with suppress(RuntimeError):  # too many threads: requests stand in for this one
            state.thread.start()


def _run_last_jobs() -> None:
    _run_round((job for job in jobs.values() if job.at_exit), EXIT_TIMEOUT)


def _loop() -> None:
    _run_round(job for job in jobs.values() if job.at_start)

    while True:
        time.sleep(INTERVAL)
        if state.thread is not threading.current_thread():
            return  # the state was reset, and has another thread

        run()
        connections.close_all()  # the database connections that jobs opened in this thread
