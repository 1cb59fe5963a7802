"""What a process does beside its requests: once a second, from a daemon thread, and once more before it ends.

The thread starts with the first job that is due, so a fork starts its own. Where threads do not run (uWSGI without
--enable-threads), the next request that notices does the round itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable

from django.db import connections

INTERVAL = 0.8  # seconds between rounds, so that a second is kept with room

_jobs: list[Callable[[], None]] = []
_lock = threading.Lock()
_round = threading.Lock()
_owner: int | None = None
_last = 0.0


def every_second(job: Callable[[], None]) -> None:
    _jobs.append(job)


def wake() -> None:
    """Called on every request: cheap, unless the thread is missing or stands still."""
    if _owner != os.getpid():
        _start()
    elif time.monotonic() - _last > 2 * INTERVAL:
        run()


def run() -> None:
    """One round, now; whoever is second lets the first finish. A job never fails its caller."""
    global _last
    if not _round.acquire(blocking=False):
        return
    try:
        _last = time.monotonic()
        for job in _jobs:
            with contextlib.suppress(Exception):
                job()
    finally:
        _round.release()


def _start() -> None:
    global _owner, _last
    with _lock:
        if _owner == os.getpid():
            return
        _owner, _last = os.getpid(), time.monotonic()
        atexit.register(run)
        threading.Thread(target=_loop, name="rlaas_django", daemon=True).start()


def _loop() -> None:
    while True:
        time.sleep(INTERVAL)
        run()
        connections.close_all()  # this thread's, to the database, which a job may have asked


def _forget_after_fork() -> None:
    global _lock, _round
    _lock, _round = threading.Lock(), threading.Lock()  # the parent's may have been held


os.register_at_fork(after_in_child=_forget_after_fork)
