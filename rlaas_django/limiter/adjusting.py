"""Refund what checks charged, once each.

Refunds of cancelled requests run in tasks of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from .. import backend
from ..backend import Call, UnavailableError, script_call
from ..backend.scripts import for_algorithms
from ..core.decision import Decision
from ..core.keys import Identity
from ..core.policy import Policy
from ..runtime.clock import script_time
from . import fallback
from .plan import Check, plan
from .refusal_cache import Counter, cached_refusals
from .replies import charged_counters, decided_arguments, refund_arguments

# What a refund takes for each policy, after the check's unique id and its cost: the
# policy's ScriptArguments, and charged_at.
CHARGE_SIZE = 6

# An event loop keeps weak references only.
_tasks: set[asyncio.Task[Refunded]] = set()


class Refunded(NamedTuple):
    """The units that were refunded, and why others were not."""

    units: int
    error: UnavailableError | None = None


class _Refund:
    """What receipts say is to be refunded."""

    def __init__(self, receipts: list[Any]) -> None:
        self.calls: list[Call] = []
        self._counters: list[Counter] = []
        self._units = 0  # of this process' own counters
        with suppress(IndexError):  # none is left
            while True:
                # `pop` is atomic, so that each receipt is refunded by one caller.
                self._add(receipts.pop())

    def _add(self, receipt: Any) -> None:
        check, reply = receipt
        keys, words = refund_arguments(check, reply)
        if check.unique == fallback.LOCAL:
            self._units += fallback.refund(keys, words)
        elif keys:
            self._counters += charged_counters(check, reply)
            self.calls.append(refund_call(keys, words))

    def result(self, results: Iterable[Any]) -> Refunded:
        return sum_refunds(results, self._counters, self._units)


def refund(decision: Decision) -> bool:
    """Refund what a decision charged, once.

    Return False when there is nothing (more) to refund. A unit that has left its
    window is not refunded.
    """
    return require_refunded(refund_all(decision.receipts))


async def arefund(decision: Decision) -> bool:
    """As `refund`, natively async.

    A caller that is cancelled does not stop it.
    """
    return require_refunded(await arefund_all(decision.receipts))


def refund_all(receipts: list[Any]) -> Refunded:
    """Refund what is not refunded yet, in one round trip per server."""
    refunds = _Refund(receipts)
    if not refunds.calls:
        return refunds.result(())
    # Not by the check's own topology: this may be a fork of its process, which must not
    # use its connections.
    return refunds.result(backend.execute_each(backend.topology(), refunds.calls))


async def arefund_all(receipts: list[Any]) -> Refunded:
    """As `refund_all`, natively async.

    A caller that is cancelled does not stop it.
    """
    if not receipts:
        return Refunded(0)
    return await asyncio.shield(refund_later(receipts))


def refund_later(receipts: list[Any]) -> asyncio.Task[Refunded]:
    """Refund in a task of its own.

    In a task that was cancelled, the next `await` may also be cancelled.
    """
    task = asyncio.get_running_loop().create_task(_arefund_all(receipts))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def _arefund_all(receipts: list[Any]) -> Refunded:
    refunds = _Refund(receipts)
    if not refunds.calls:
        return refunds.result(())
    topology = backend.topology()
    return refunds.result(await backend.aexecute_each(topology, refunds.calls))


def refundable_call(check: Check) -> Call:
    """Return the call of a check.

    The check is refunded if its caller is cancelled.
    """
    call = check.pack()
    if check.charge:
        call.on_abandoned = partial(_refund_abandoned, check)
    return call


def _refund_abandoned(check: Check, reply: Any) -> None:
    if isinstance(reply, list):  # an error charged nothing
        refund_later([(check, reply)])


def refund_units(identity: Identity, policy: Policy, units: int) -> int:
    """Refund some units of an identity's usage, the newest first.

    Return how many were refunded.
    """
    peek = plan(identity, policy, 1, charge=False)
    topology = peek.policy_set.topology
    keys = peek.policy_set.keys(peek.identities)

    call = peek.pack()
    call.for_page = True
    reply = backend.execute(topology, call)
    arguments = decided_arguments(peek, reply, 0)
    call = refund_call(keys, ["", units, *arguments, 0])
    call.for_page = True
    refunded = sum(backend.execute(topology, call))
    peek.policy_set.refusals.invalidate(peek.policy_set.names)
    return int(refunded)


def sum_refunds(
    results: Iterable[Any], changed: Iterable[str | Counter], units: int = 0
) -> Refunded:
    """Sum the units that refunds returned, and keep the last error.

    `changed` are the counters that were refunded, or whole policies. Cached refusals
    of other identities stay: most refunds are of a request's own charge, and an attack
    that causes many of them must stay cheap.
    """
    error = None
    for result in results:
        if isinstance(result, UnavailableError):
            error = result
        else:
            units += sum(result)
    cached_refusals().invalidate(changed)
    return Refunded(units, error)


def require_refunded(refunded: Refunded) -> bool:
    """Raise what prevented a refund.

    Return whether there was anything to refund.
    """
    if refunded.error is not None:
        raise refunded.error
    return refunded.units > 0


def refund_call(keys: Sequence[str], words: Sequence[Any]) -> Call:
    """Return the call that refunds charges.

    `words` are the unique id, the cost, and CHARGE_SIZE words per policy. The last key
    may be that of a marker, and the last word its ttl.
    """
    policies = (len(words) - 2) // CHARGE_SIZE
    algorithms = words[2 : 2 + CHARGE_SIZE * policies : CHARGE_SIZE]
    return script_call(
        for_algorithms(algorithms),
        keys,
        (script_time(), "refund", *words),
        reply_lengths=(policies, 0),
        is_refund=True,
    )
