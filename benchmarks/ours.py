"""This package, each algorithm through `check()`; and its script sent by redis-py, to tell script from transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from rlaas_django import Decision, Policy, check
from rlaas_django.limiter import compile_policies

from . import server
from .contender import BESIDE, OURS, Answer, Ask, Contender, Rate

DEFAULT = "sliding-window-algo"
COMPACT = "sliding-window-compact-algo"
COUNTER = "sliding-window-counter-algo"
FIXED = "fixed-window-algo"
BUCKET = "token-bucket-algo"
ALGORITHMS = (DEFAULT, COMPACT, COUNTER, FIXED, BUCKET)
SOMEONE = "someone-to-be-replaced"


@contextmanager
def local_refusals(on: bool) -> Iterator[bool]:
    """With refusals repeated from memory, or asked of Redis each time; False when there is no such setting yet."""
    with override_settings(RATE_LIMITER={**settings.RATE_LIMITER, "LOCAL_REFUSALS": on}):
        try:
            check("probe", Policy("probe", (1_000_000, 60), algo=BUCKET))
        except ImproperlyConfigured:
            pass
        else:
            yield True
            return
    yield False


def policies(algo: str, rates: Sequence[Rate]) -> Policy | list[Policy]:
    made = [Policy(f"{algo}-{limit}-{window}", (limit, window), algo=algo) for limit, window in rates]
    return made if len(made) > 1 else made[0]


def build(algo: str, rates: Sequence[Rate]) -> Ask:
    policy = policies(algo, rates)

    def ask(identity: str) -> Answer:
        return figures(check(identity, policy))

    return ask


def build_in_process(algo: str, rates: Sequence[Rate]) -> Ask:
    """By a cache that is not on Redis, where each process counts by itself."""
    policy = policies(algo, rates)

    def ask(identity: str) -> Answer:
        return figures(check(identity, compile_policies(policy, "process")))

    return ask


def build_bare(algo: str, rates: Sequence[Rate]) -> Ask:
    """Of the figures, only whether it is allowed."""
    policy = policies(algo, rates)

    def ask(identity: str) -> Answer:
        return (check(identity, policy).allowed,)

    return ask


def figures(decision: Decision) -> Answer:
    """What headers need; a figure that is worked out only when it is read has to be read here too."""
    if decision.degraded:
        raise RuntimeError("decided without Redis")
    return decision.allowed, decision.retry_after, decision.limit, decision.remaining, decision.reset_after


class Replay:
    """The EVALSHA that a decision sends, as words to be sent by someone else."""

    def __init__(self, ask: Ask) -> None:
        ask(SOMEONE)  # the server knows the script from here on
        first, second = (self._sent(partial(ask, SOMEONE)) for _ in range(2))
        self.sha, self.count = first[1], int(first[2])
        self._words = first[3:]
        # What differs between two decisions about one identity tells them apart on the server.
        self._unique = [i for i, (one, other) in enumerate(zip(first[3:], second[3:], strict=True)) if one != other]
        self._numbers = itertools.count()

    @staticmethod
    def _sent(action: Callable[[], object]) -> tuple[str, ...]:
        return next(sent.words for sent in server.watch(action) if sent.name == "EVALSHA" and not sent.in_script)

    def words(self, identity: str) -> list[str]:
        words = [word.replace(SOMEONE, identity) for word in self._words]
        for i in self._unique:
            words[i] = f"{next(self._numbers):0{len(words[i])}x}"
        return words


def build_by_redis_py(algo: str, rates: Sequence[Rate]) -> Ask:
    replay, client = Replay(build(algo, rates)), server.client()

    def ask(identity: str) -> Answer:
        return None, client.evalsha(replay.sha, replay.count, *replay.words(identity))

    return ask


CONTENDERS = [
    Contender(f"rlaas_django, {algo}", OURS, "`check()`", partial(build, algo), algo in (COUNTER, FIXED))
    for algo in ALGORITHMS
]
IN_PROCESS = Contender(
    f"rlaas_django without Redis, {DEFAULT}",
    BESIDE,
    "`check()`, counted in the process",
    partial(build_in_process, DEFAULT),
)
BY_REDIS_PY = [
    Contender(
        f"the script of {algo} by redis-py",
        BESIDE,
        "`client.evalsha()` with the words of `check()`; the reply is not read into a decision",
        partial(build_by_redis_py, algo),
        variant=algo == COMPACT,
    )
    for algo in (DEFAULT, COMPACT)
]
