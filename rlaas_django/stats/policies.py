"""Every policy that decides, also in other processes, and the rates of identities where a rate is not fixed.

A process knows the policies of the settings and of its decorated views. The others, such as those of checks in code,
and the rates that functions return, are in Redis, written with the statistics:

  rlaas:policies                      HASH     policy -> its definition as JSON
  rlaas:limit:<policy>/<identity>     STRING   <limit>/<window>: the rate that was decided with; kept for two windows
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .. import backend, conf
from ..backend.scripts import RECORD
from ..core.policy import Policy, PolicyError, Rate, is_key
from ..runtime import process, registry
from .schema import DAY, HOUR, as_pairs, as_text

POLICIES_KEY = "rlaas:policies"
POLICIES_TTL = 9 * DAY
MAX_POLICIES = 1_000
MAX_LIMITS = 1_000  # identities per flush
MAX_KEPT = 10_000  # of what this process has written lately
MINIMUM_TTL = 60
OPTIONS = ("algo", "burst", "on_failure", "shadow", "label")


def limit_key(policy: str, identity: str) -> str:
    return f"rlaas:limit:{policy}/{identity}"


def depends_on_request(_request: object) -> None:
    """Stand for the rate of a policy whose rate function is in another process."""


class Definitions:
    """What this process has to write, and what it wrote lately and need not write again."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._policies: dict[str, Policy] = {}
        self._rates: dict[tuple[str, str], Rate] = {}  # by policy and identity
        self._fixed: set[str] = (
            set()
        )  # as `names_with_fixed_rate()` had it when this flush began
        self._written: dict[
            Any, tuple[object, float]
        ] = {}  # what, and until when it need not be written

    def note(self, policy: Policy, identity: str) -> None:
        """Note a policy that decided, and its rate for an identity if it is not fixed."""
        if conf.config().policies.get(policy.name) is policy:  # nearly all
            return
        if not self._policies:
            self._fixed = names_with_fixed_rate()
        self._policies[policy.name] = policy
        if policy.name not in self._fixed and len(self._rates) < MAX_LIMITS:
            self._rates[policy.name, identity] = policy.fixed_rate

    def write(self) -> None:
        """Write what was noted and is new."""
        policies, self._policies = self._policies, {}
        rates, self._rates = self._rates, {}
        local = of_this_process() if policies else {}
        fields: list[str] = []
        for name, policy in policies.items():
            definition = _definition(local.get(name, policy))
            if self._is_due(name, definition, HOUR):
                fields += [name, definition]
        if fields:
            call = backend.script_call(
                RECORD,
                (POLICIES_KEY,),
                (0, "fields", POLICIES_TTL, MAX_POLICIES, len(fields), *fields),
            )
            backend.execute(backend.topology(), call)
        backend.run_commands(
            [
                (
                    "SET",
                    limit_key(*pair),
                    f"{rate.limit}/{rate.window}",
                    "EX",
                    MINIMUM_TTL + 2 * rate.window,
                )
                for pair, rate in rates.items()
                if self._is_due(pair, rate, (MINIMUM_TTL + rate.window) // 2)
            ]
        )

    def _is_due(self, key: object, value: object, seconds: float) -> bool:
        """Return whether to write a value, which need not be done again for some seconds."""
        now = time.monotonic()
        written, until = self._written.get(key, (None, 0.0))
        if written == value and now < until:
            return False
        if len(self._written) >= MAX_KEPT:
            self._written.clear()
        self._written[key] = value, now + seconds
        return True


definitions = Definitions()
process.on_fork(definitions.reset)


def of_this_process() -> dict[str, Policy]:
    """Return the policies of the settings and of decorated views in this process, by name."""
    found = dict(conf.config().policies)
    for policy in (
        policy for view in registry.limited_views() for policy in view.policies
    ):
        if isinstance(policy, Policy):
            found.setdefault(policy.name, policy)
    return found


def names_with_fixed_rate() -> set[str]:
    """Return the names of the policies of this process whose rate is no function."""
    return {
        name
        for name, policy in of_this_process().items()
        if isinstance(policy.rate, Rate)
    }


def all_policies() -> dict[str, Policy]:
    """Return every policy by name; while Redis is unavailable, those of this process."""
    found = of_this_process()
    try:
        (reply,) = backend.run_commands([("HGETALL", POLICIES_KEY)])
    except backend.UnavailableError:
        return found
    for name, definition in as_pairs(reply):
        if (
            name not in found
            and (policy := _read(name, as_text(definition))) is not None
        ):
            found[name] = policy
    return found


def with_decided_rates(pairs: Iterable[tuple[Policy, str]]) -> list[tuple[Policy, str]]:
    """Return pairs of policy and identity with the rate that was decided with, where it is not fixed.

    A pair whose rate is not known is left out: nothing was decided about it lately.
    """
    wanted, local, found = list(pairs), names_with_fixed_rate(), []
    asked = [
        (policy.name, identity)
        for policy, identity in wanted
        if policy.name not in local
    ]
    replies = backend.run_commands([("GET", limit_key(*pair)) for pair in asked])
    rates = {
        pair: as_text(reply)
        for pair, reply in zip(asked, replies, strict=True)
        if reply
    }
    for policy, identity in wanted:
        if rate := rates.get((policy.name, identity)):
            limit, _, window = rate.partition("/")
            found.append(
                (replace(policy, rate=Rate(int(limit), int(window))), identity)
            )
        elif isinstance(policy.rate, Rate):
            found.append((policy, identity))
    return found


def _definition(policy: Policy) -> str:
    """Return a policy as JSON; without the rate or the key where a function gives them."""
    fields: dict[str, Any] = {option: getattr(policy, option) for option in OPTIONS}
    if isinstance(policy.rate, Rate):
        fields["rate"] = str(policy.rate)
    if isinstance(policy.key, str):
        fields["key"] = policy.key
    else:
        path = f"{getattr(policy.key, '__module__', '')}.{getattr(policy.key, '__qualname__', '')}"
        fields["key"] = path if is_key(path) else "site.function"
    return json.dumps(fields)


def _read(name: str, definition: str) -> Policy | None:
    """Return the policy of a definition; None for one of another version of the package."""
    try:
        fields = json.loads(definition)
        return Policy(name, fields.pop("rate", depends_on_request), **fields)
    except (PolicyError, TypeError, ValueError):
        return None
