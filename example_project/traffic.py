"""A day of traffic for the admin panel, as the statistics would have recorded it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

from rlaas_django import Decision, Outcome, Policy, backend, conf
from rlaas_django.core.keys import EncodedIdentity, encode, key_kind
from rlaas_django.core.policy import Rate
from rlaas_django.runtime import registry
from rlaas_django.runtime.observers import REQUEST, Observation
from rlaas_django.stats import reader, recorder

MINUTES = 24 * 60
ADDRESSES = [f"203.0.113.{n}" for n in range(1, 40)]
ATTACKER = "198.51.100.23"
ATTACK = range(190, 215)  # minutes ago
BROWSER = "Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0"
PROGRAM = "python-requests/2.32"


def generate(users: list[int]) -> None:
    """Write a day of traffic, unless there are statistics already."""
    try:
        if any(reader.totals()):
            return
        for moment in Traffic(users).moments():
            recorder.pending.append(moment)
            if len(recorder.pending) >= recorder.MAX_PENDING // 2:
                recorder.flush()
        recorder.flush()
    except backend.UnavailableError:
        pass  # the panel opens empty


class Traffic:
    """Requests of a day, by chance but the same each time."""

    def __init__(self, users: list[int]) -> None:
        self.users = users
        self.chance = random.Random(7)
        self.now = time.time()

    def moments(self) -> Iterator[tuple[float, Observation]]:
        """Yield what was decided, and when: usual traffic, then an attack."""
        limits = [*_limits_in_use()]
        for minutes_ago in range(MINUTES, 0, -3):
            for name, policy in limits:
                yield from self._usual(minutes_ago, name, policy)

        name, policy = _limit_of_login(limits)
        for minutes_ago in ATTACK:
            at = self.now - 60 * minutes_ago
            for _ in range(40):
                yield at, self._observation(name, policy, ATTACKER, refused=True)

    def _usual(
        self, minutes_ago: int, name: str, policy: Policy
    ) -> Iterator[tuple[float, Observation]]:
        """Yield some requests, more of them by day than by night."""
        time_of_day = (self.now / 60 - minutes_ago) / MINUTES
        share = 0.55 + 0.45 * math.sin(time_of_day * 2 * math.pi)
        for _ in range(round(share * self.chance.uniform(0, 3))):
            at = self.now - 60 * minutes_ago + self.chance.uniform(0, 60)
            refused = self.chance.random() < 0.06
            address = self.chance.choice(ADDRESSES)
            yield at, self._observation(name, policy, address, refused=refused)

    def _observation(
        self, name: str, policy: Policy, address: str, *, refused: bool
    ) -> Observation:
        outcome = self._outcome(policy, address, refused=refused)
        decision = Decision(not refused, (outcome,))
        agent = BROWSER
        if address == ATTACKER:
            agent = PROGRAM
        return Observation(
            decision=decision,
            refusal=decision if refused else None,
            source=REQUEST,
            method="GET",
            path=f"/try/{name.rpartition('.')[2]}/",
            address=address,
            user_agent=agent,
        )

    def _outcome(self, policy: Policy, address: str, *, refused: bool) -> Outcome:
        limit = policy.capacity
        count = self.chance.randrange(limit)
        remaining = limit - count - 1
        wait = 0.0
        if refused:
            count = limit
            remaining = 0
            wait = self.chance.uniform(0.2, policy.window)

        return Outcome(
            policy,
            EncodedIdentity(self._identity(policy, address)),
            not refused,
            limit,
            count,
            remaining,
            wait,
            policy.window * 0.8,
            policy.window,
        )

    def _identity(self, policy: Policy, address: str) -> str:
        """Return a user of the site for most requests that are counted by user."""
        by_user = key_kind(policy.key) in ("user", "user_or_ip")
        if by_user and self.chance.random() < 0.7:
            return encode(str(self.chance.choice(self.users)))
        return f"ip={address}"


def _limits_in_use() -> Iterator[tuple[str, Policy]]:
    """Yield the views with the policies that refuse requests at a fixed rate."""
    for view in registry.limited_views():
        for name_or_policy in view.policies:
            policy = name_or_policy
            if isinstance(policy, str):
                policy = conf.config().policy(policy)
            if isinstance(policy.rate, Rate) and not policy.shadow:
                yield view.name, policy


def _limit_of_login(limits: list[tuple[str, Policy]]) -> tuple[str, Policy]:
    for name, policy in limits:
        if "log_in" in name:
            return name, policy
    return limits[0]
