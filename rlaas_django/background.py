"""What a process does beside its requests: about once a second, from a daemon thread, and once more before it ends.

The thread starts with the first request, so a fork starts its own. Where threads do not run (uWSGI without
--enable-threads), a request that notices does the jobs that are quick.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable

from django.db import connections

INTERVAL = 0.8  # seconds between rounds, so that a second is kept with room
STALE = 5.0  # seconds without a round: the thread does not run

Job = Callable[[], None]

_jobs: list[Job] = []  # quick ones, which a request may have to do
_slow_jobs: list[Job] = []  # for the thread alone
_lock = threading.Lock()
_round = threading.Lock()
_owner: int | None = None
_last = 0.0


def every_second(job: Job, *, slow: bool = False) -> None:
    (_slow_jobs if slow else _jobs).append(job)


def wake() -> None:
    """Called on every request: cheap, unless the thread is missing or stands still."""
    if _owner != os.getpid():
        _start()
    elif time.monotonic() - _last > STALE and not _in_a_loop():
        _do(_jobs)


def run(wait: float = 0) -> None:
    """One round, now; a round under way is waited for so long, else left alone."""
    _do([*_jobs, *_slow_jobs], wait)


def _do(jobs: list[Job], wait: float = 0) -> None:
    """A job never fails its caller."""
    global _last
    if not _round.acquire(timeout=wait) if wait else not _round.acquire(blocking=False):
        return
    try:
        for job in jobs:
            with contextlib.suppress(Exception):
                job()
    finally:
        _last = time.monotonic()
        _round.release()


def _in_a_loop() -> bool:
    """Here a round would keep every other request of the loop waiting."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _start() -> None:
    global _owner, _last
    with _lock:
        if _owner == os.getpid():
            return
        _owner, _last = os.getpid(), time.monotonic()
        atexit.register(_do, _jobs, 2)
        with contextlib.suppress(RuntimeError):  # no more threads to be had: requests do it
            threading.Thread(target=_loop, name="rlaas_django", daemon=True).start()


def _loop() -> None:
    while True:
        time.sleep(INTERVAL)
        run()
        connections.close_all()  # this thread's, to the database, which a job may have asked


def _renew_locks() -> None:
    global _lock, _round
    _lock, _round = threading.Lock(), threading.Lock()  # the parent's may have been held


os.register_at_fork(after_in_child=_renew_locks)
