"""The background thread of a process, and the jobs that it runs once a second.

A module that needs a job registers it. The thread starts with the first recorded
request, so a forked worker starts its own. Where threads do not run (uWSGI without
--enable-threads), a request that finds the thread stalled runs some of the jobs itself.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from django.db import connections

from . import log, process

# Seconds between two rounds. Changes are promised within a second, of which a round
# takes a part.
INTERVAL = 0.8
STALLED_AFTER = 5.0  # seconds without a round
EXIT_TIMEOUT = 2.0  # seconds that a process waits at its end for a round in progress


# When a job also runs, beside in each round.
AT_START = "at start"  # as soon as the thread starts
WHEN_STALLED = "when stalled"  # in a request that finds the thread stalled
AT_EXIT = "at exit"  # at the end of the process

Job = Callable[[], object]


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
        self.pid: int | None = None  # a server in C may fork without Python's hooks
        self.thread: threading.Thread | None = None
        self.wake_at = 0.0  # by `time.monotonic`: when a request should call `wake`


jobs: dict[Job, tuple[str, ...]] = {}  # with the moments when they also run
state = State()
process.on_fork(state.reset)


def register(job: Job, *moments: str) -> None:
    """Have a job run in each round, and at the given moments."""
    jobs[job] = moments


def wake() -> None:
    """Start the thread, or stand in for one that has stalled.

    To be called by requests once `state.wake_at` is over.
    """
    if state.pid != os.getpid():
        _start()
    elif not _in_event_loop():
        _run_round(_jobs_for(WHEN_STALLED))


def run(wait: float = 0) -> None:
    """Run a round now; skip it if one is still in progress after `wait` seconds."""
    _run_round([*jobs], wait)


def _jobs_for(moment: str) -> list[Job]:
    return [job for job, moments in jobs.items() if moment in moments]


def _run_round(jobs: Sequence[Job], wait: float = 0) -> None:
    lock = state.round_lock
    if not lock.acquire(timeout=wait):
        return

    try:
        for job in jobs:
            _run_job(job)
    finally:
        if state.pid is not None:  # the state was not reset meanwhile
            state.wake_at = time.monotonic() + STALLED_AFTER
        lock.release()


def _run_job(job: Job) -> None:
    """Run a job; an error fails no request and no other job."""
    try:
        job()
    except log.LoggedError:
        pass
    except Exception as error:  # noqa: BLE001
        name = f"{job.__module__.rpartition('.')[2]}.{job.__name__}"
        log.error("Background job %s failed: %s", name, log.escaped(repr(error)))


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
        state.wake_at = time.monotonic() + STALLED_AFTER
        # As late as possible: what is registered last runs first, before any teardown.
        atexit.unregister(_run_last_jobs)
        atexit.register(_run_last_jobs)

        state.thread = threading.Thread(target=_loop, name="rlaas_django", daemon=True)
        with suppress(RuntimeError):  # too many threads: requests stand in for this one
            state.thread.start()


def _run_last_jobs() -> None:
    _run_round(_jobs_for(AT_EXIT), EXIT_TIMEOUT)


def _loop() -> None:
    _run_round(_jobs_for(AT_START))

    while True:
        time.sleep(INTERVAL)
        if state.thread is not threading.current_thread():
            return  # the state was reset, and has another thread

        run()
        connections.close_all()  # which jobs opened in this thread, to the database
