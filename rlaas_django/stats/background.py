"""A daemon thread that reads the overrides of networks, flushes statistics and restores lost overrides, once a second.

The thread starts with the first recorded request, so a forked worker starts its own. Where threads do not run (uWSGI
without --enable-threads), a request that finds the thread stalled flushes the statistics itself.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable

from django.apps import apps
from django.db import connections

from .. import backend
from ..limiter import networks, overrides
from ..runtime import log, process
from . import recorder

INTERVAL = (
    0.8  # seconds between rounds; a round takes time too, and a second is promised
)
STALLED_AFTER = 5.0  # seconds without a round
RESTORE_INTERVAL = 30.0  # seconds between two restores, and between two comparisons of all overrides with Redis
NO_DATABASE = "django.db.backends.dummy"  # what Django makes of DATABASES = {}
EXIT_TIMEOUT = 2.0  # seconds that a process waits at its end for a round in progress


class State:
    """The thread of this process, and when it last ran."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start over: the thread is not inherited by a fork, and the locks may be held by a thread of the parent."""
        self.start_lock = threading.Lock()
        self.round_lock = threading.Lock()
        self.pid: int | None = (
            None  # compared on each request: a server written in C may fork without Python's hooks
        )
        self.thread: threading.Thread | None = None
        self.last_round = 0.0
        self.next_restore = self.next_comparison = 0.0
        self.compared = ""  # the last identity whose overrides were compared with Redis


state = State()
process.on_fork(state.reset)


def wake() -> None:
    """Start the thread if this process has none, or flush here if it has stalled; cheap enough for every request."""
    if state.pid != os.getpid():
        _start()
    elif time.monotonic() - state.last_round > STALLED_AFTER and not _in_event_loop():
        _run_jobs([networks.refresh, recorder.flush])


def run(wait: float = 0) -> None:
    """Run a round now; if one is in progress, wait for it up to `wait` seconds, then skip."""
    _run_jobs([networks.refresh, recorder.flush, restore_lost_overrides], wait)


def restore_lost_overrides() -> None:
    """Write to Redis what it lacks of the overrides in the database.

    All of them at once after Redis was emptied. And every 30 seconds they are compared: Redis may have evicted some, or
    was unavailable when they were set or ended.
    """
    now = time.monotonic()
    if now < min(state.next_restore, state.next_comparison) or not apps.is_installed(
        "rlaas_django"
    ):
        return
    if all(each["ENGINE"] == NO_DATABASE for each in connections.settings.values()):
        return
    is_lost = (
        overrides.is_lost()
    )  # raises while Redis is unavailable: then the comparison stays due
    from ..models import Override  # models need the app registry

    if is_lost and now >= state.next_restore:
        state.next_restore = now + RESTORE_INTERVAL
        Override.restore()
    if now >= state.next_comparison:
        after, state.compared, state.next_comparison = (
            state.compared,
            "",
            now + RESTORE_INTERVAL,
        )
        state.compared = Override.publish_missing(after)
        if state.compared:  # more of them in the next round
            state.next_comparison = now


def _run_jobs(jobs: list[Callable[[], object]], wait: float = 0) -> None:
    """Run the jobs unless a round is in progress; a job that fails is logged, and fails no request and no other job."""
    lock = state.round_lock
    if not lock.acquire(timeout=wait):
        return
    try:
        for job in jobs:
            try:
                job()
            except backend.UnavailableError:
                pass  # its circuit breaker has logged it
            except Exception as error:  # noqa: BLE001
                name = f"{job.__module__.rpartition('.')[2]}.{job.__name__}"
                log.error(
                    "Background job %s failed: %s", name, log.escaped(repr(error))
                )
    finally:
        state.last_round = time.monotonic()
        lock.release()


def _in_event_loop() -> bool:
    """Return whether this thread runs an event loop, where a round would block all other requests."""
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop() is not None
    return False


def _start() -> None:
    with state.start_lock:
        if state.pid == os.getpid():
            return
        state.pid, state.last_round = os.getpid(), time.monotonic()
        atexit.unregister(_run_jobs)
        # As late as possible: what is registered last runs first, before any teardown.
        atexit.register(_run_jobs, [recorder.flush], EXIT_TIMEOUT)
        state.thread = threading.Thread(target=_loop, name="rlaas_django", daemon=True)
        with contextlib.suppress(
            RuntimeError
        ):  # no more threads can be started: requests flush instead
            state.thread.start()


def _loop() -> None:
    _run_jobs(
        [networks.refresh]
    )  # at once: overrides of networks are in force within a second
    while True:
        time.sleep(INTERVAL)
        if (
            state.thread is not threading.current_thread()
        ):  # the state was reset, and has a thread of its own
            return
        run()
        connections.close_all()  # the database connections of this thread, which restoring may have opened
