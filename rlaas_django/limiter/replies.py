"""A check before it runs, and what the script's reply says of it. No I/O."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import backend
from ..backend.commands import Call, script_call
from ..backend.scripts import for_algorithms
from ..core.clock import script_time
from ..core.decision import REPLY_SIZE, Decision, Outcome, read_outcomes
from ..core.keys import Identity
from ..core.policy import MAX_PRODUCT, Policies, ScriptArguments, shown
from .compiled import CompiledPolicySet, compile_policies, unique_ids

NEVER_FITS = 2 * MAX_PRODUCT  # beyond every limit; a larger cost may be too long to send


class Check(NamedTuple):
    """A check before it runs: who is charged what, by which policies."""

    policy_set: CompiledPolicySet
    identities: tuple[str, ...]
    unique: str
    cost: int
    charge: bool

    def call(self) -> Call:
        """Return the call that decides all of it."""
        return self.policy_set.call(self.identities, self.unique, self.cost, charge=self.charge)

    def part(self, indexes: Sequence[int], *, charge: bool) -> Check:
        """Return the check of those policies whose counters are in one slot of a cluster."""
        identities = tuple([self.identities[i] for i in indexes])
        return Check(self.policy_set.subset(indexes), identities, self.unique, self.cost, charge)


def with_limit(arguments: ScriptArguments, limit: int) -> ScriptArguments:
    """Return a policy's arguments under the limit that it was decided with, which an override may have set."""
    return arguments if limit == arguments.capacity else arguments._replace(limit=limit, capacity=limit)


def plan(identity: Identity, policy: Policies | CompiledPolicySet, cost: int, *, charge: bool = True) -> Check:
    """Return the check of an identity under these policies."""
    if type(cost) is not int or cost < 0:
        raise ValueError(f"The cost {shown(cost)} is not a whole number of at least 0.")
    policy_set = policy if type(policy) is CompiledPolicySet else compile_policies(policy)  # type: ignore[arg-type]
    if cost != 1:
        cost, charge = min(cost, NEVER_FITS), charge and cost > 0
    return Check(policy_set, policy_set.identify(identity), unique_ids.next(), cost, charge)


def read(check: Check, reply: Any) -> Decision:
    """Return the decision that a script's reply means; UnavailableError when it is no reply of our scripts."""
    policy_set, identities, _, _, charge = check
    verify(check, reply)
    allowed = all(map(operator.or_, reply[1::REPLY_SIZE], policy_set.shadows))
    receipts = [(check, reply)] if allowed and charge else []
    return Decision.from_reply(policy_set, identities, reply, allowed, receipts)


def verify(check: Check, reply: Any) -> None:
    """Raise UnavailableError unless a reply is one of our scripts: seven numbers for each policy after the time."""
    try:
        if type(reply) is list and len(reply) == REPLY_SIZE * len(check.identities) + 1 and sum(reply):
            return
    except TypeError:  # not all are numbers
        pass
    error = backend.UnavailableError(f"unexpected reply: {reply!r:.100}")
    topology, keys = check.policy_set.topology, check.policy_set.keys(check.identities)
    if (server := topology.server_for(keys[0])) is not None:
        server.breaker.log_error(error)
    raise error


def refund_call(check: Check, reply: list[Any]) -> Call | None:
    """Return the call that refunds what a check charged; None when it charged nothing."""
    policy_set, identities, unique, cost, _ = check
    keys: list[str] = []
    words: list[str | int] = []
    algorithms: set[str] = set()
    limits, stamps = reply[6::REPLY_SIZE], reply[7::REPLY_SIZE]
    rows = zip(policy_set.keys(identities), policy_set.arguments, limits, stamps, strict=True)
    for key, arguments, limit, charged_at in rows:
        if charged_at >= 0:
            keys.append(key)
            words += (*with_limit(arguments, limit), charged_at)
            algorithms.add(arguments.algo)
    if not keys:
        return None
    words = [script_time(), "refund", unique, cost, *words]
    return script_call(for_algorithms(algorithms), keys, words, is_refund=True)


def outcomes(check: Check, reply: Any) -> tuple[Outcome, ...]:
    """Return what a reply says of each policy; UnavailableError when it is no reply of our scripts."""
    verify(check, reply)
    return read_outcomes(check.policy_set, check.identities, reply)
