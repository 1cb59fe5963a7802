"""Every policy that decides, also in other processes, and the rates of identities.

A process knows the policies of the settings and of its decorated views. The others,
such as those of checks in code, and the rates that functions return, are in Redis,
written with the statistics:

  rlaas:policies                    HASH     policy -> its definition as JSON
  rlaas:limit:<policy>/<identity>   STRING   <limit>/<window>: the rate that was decided
                                             with; kept for two windows
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .. import backend, conf
from ..core.policy import Policy, PolicyError, Rate
from ..runtime import process, registry
from .schema import DAY, HOUR, Statistic, as_pairs, record_call

POLICIES = Statistic("rlaas:policies", "fields", 9 * DAY, size=1_000)
MAX_LIMITS = 1_000  # identities per flush
MAX_KEPT = 10_000  # of what this process has written lately
MINIMUM_TTL = 60
OPTIONS = ("algo", "burst", "on_failure", "shadow", "label")


def limit_key(policy: str, identity: str) -> str:
    return f"rlaas:limit:{policy}/{identity}"


def function_elsewhere(_request: object) -> None:
    """Stand for a rate function or a key function of another process."""


class Definitions:
    """What this process has to write, and what it need not write again."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._policies: dict[str, Policy] = {}
        # By policy and identity.
        self._rates: dict[tuple[str, str], Rate] = {}
        # As `of_this_process()` had it when this flush began.
        self._known: dict[str, Policy] = {}
        # What was written, and until when it need not be written again.
        self._written: dict[object, tuple[object, float]] = {}

    def note(self, policy: Policy, identity: str) -> None:
        """Note a policy that decided, and its rate for an identity if not fixed."""
        if conf.config().policies.get(policy.name) is policy:  # nearly all
            return
        if not self._policies:
            self._known = of_this_process()

        self._policies[policy.name] = policy
        is_known = self._known.get(policy.name) == policy
        if not is_known and len(self._rates) < MAX_LIMITS:
            self._rates[policy.name, identity] = policy.fixed_rate

    def write(self) -> None:
        """Write what was noted and is new."""
        policies = self._policies
        rates = self._rates
        self._policies = {}
        self._rates = {}

        if policies:
            self._write_policies(policies)

        commands = []
        for pair, rate in rates.items():
            if self._is_due(pair, rate, (MINIMUM_TTL + rate.window) // 2):
                ttl = MINIMUM_TTL + 2 * rate.window
                text = f"{rate.limit}/{rate.window}"
                commands.append(("SET", limit_key(*pair), text, "EX", ttl))

        backend.run_commands(commands)

    def _write_policies(self, policies: dict[str, Policy]) -> None:
        """Write the definitions of policies; that of this process is preferred.

        Its rate may be a function, where the policy that decided has a fixed one.
        """
        fields: list[str] = []
        for name, policy in policies.items():
            definition = _definition(self._known.get(name, policy))
            if self._is_due(name, definition, HOUR):
                fields += (name, definition)

        if fields:
            call = record_call([(POLICIES.key(""), POLICIES, fields)])
            backend.execute(backend.topology(), call)

    def _is_due(self, key: object, value: object, seconds: float) -> bool:
        """Return whether to write a value, and not again for some seconds."""
        now = time.monotonic()
        written, until = self._written.get(key, (None, 0.0))
        if written == value and now < until:
            return False
        if len(self._written) >= MAX_KEPT:
            self._written.clear()

        self._written[key] = (value, now + seconds)

        return True


definitions = Definitions()
process.on_fork(definitions.reset)


def of_this_process() -> dict[str, Policy]:
    """Return the policies of the settings and of decorated views in this process."""
    policies = dict(conf.config().policies)
    for view in registry.limited_views():
        for policy in view.policies:
            if isinstance(policy, Policy):
                policies.setdefault(policy.name, policy)

    return policies


def all_policies() -> dict[str, Policy]:
    """Return every policy by name, or those of this process without Redis."""
    policies = of_this_process()
    try:
        (reply,) = backend.run_commands([("HGETALL", POLICIES.key(""))])
    except backend.UnavailableError:
        return policies

    for name, definition in as_pairs(reply):
        if name not in policies:
            with suppress(PolicyError, TypeError, ValueError):  # of another version
                functions = dict.fromkeys(("rate", "key"), function_elsewhere)
                fields = {**functions, **json.loads(definition)}
                policies[name] = Policy(name, **fields)

    return policies


def with_decided_rates(pairs: Iterable[tuple[Policy, str]]) -> list[tuple[Policy, str]]:
    """Return pairs of policy and identity with the rate that was decided with.

    A pair whose rate is not known is left out: nothing was decided about it lately.
    """
    pairs = list(pairs)
    replies = backend.run_commands(
        [("GET", limit_key(policy.name, identity)) for policy, identity in pairs]
    )

    decided = []
    for (policy, identity), rate in zip(pairs, replies, strict=True):
        if rate:
            limit, window = map(int, rate.split(b"/"))
            policy = replace(policy, rate=Rate(limit, window))
        if isinstance(policy.rate, Rate):
            decided.append((policy, identity))

    return decided


def _definition(policy: Policy) -> str:
    """Return a policy as JSON; without a rate or a key that a function gives."""
    fields: dict[str, Any] = {option: getattr(policy, option) for option in OPTIONS}
    if isinstance(policy.rate, Rate):
        fields["rate"] = str(policy.rate)
    if isinstance(policy.key, str):
        fields["key"] = policy.key

    return json.dumps(fields)
