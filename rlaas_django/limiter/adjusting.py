"""Refunds of what checks charged, once each; those of cancelled requests run in tasks of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from .. import backend
from ..backend import Call, UnavailableError, script_call
from ..backend.scripts import for_algorithms
from ..core.decision import Decision
from ..core.policy import ScriptArguments
from ..runtime.clock import script_time
from .fallback import LocalReceipt
from .policy_set import CHARGED_AT, LIMIT, REPLY_SIZE, Check
from .refusal_cache import cached_refusals

# What a refund takes for each policy, after the check's unique id and cost: the policy's ScriptArguments, charged_at
CHARGE_SIZE = 6
Refunded = tuple[
    int, UnavailableError | None
]  # units, and why others were not refunded

_tasks: set[asyncio.Task[Refunded]] = set()  # an event loop keeps weak references only


def refund(decision: Decision) -> bool:
    """Refund what a decision charged, once; return False when there is nothing (more) to refund.

    A unit that has left its window meanwhile is not refunded a second time.
    """
    return is_refunded(refund_all(decision.receipts))


async def arefund(decision: Decision) -> bool:
    """As `refund`, natively async. The refund is made, even if the caller is cancelled meanwhile."""
    return is_refunded(await arefund_all(decision.receipts))


def refund_all(receipts: list[Any]) -> Refunded:
    """Refund what is not refunded yet, in one round trip per server."""
    units, calls, policies = _take(receipts)
    # Not by the check's own topology: this may be a fork of its process, which must not use its connections.
    return total(
        backend.execute_each(backend.topology(), calls) if calls else [],
        policies,
        units,
    )


async def arefund_all(receipts: list[Any]) -> Refunded:
    """As `refund_all`, natively async; a caller that is cancelled does not stop it."""
    return await asyncio.shield(refund_later(receipts)) if receipts else (0, None)


def refund_later(receipts: list[Any]) -> asyncio.Task[Refunded]:
    """Refund in a task of its own: in one that was cancelled, the next `await` may be cancelled, too."""
    task = asyncio.get_running_loop().create_task(_arefund_all(receipts))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def refundable_call(check: Check) -> Call:
    """Return the call of a check; it is refunded if its caller is cancelled."""
    call = check.pack()
    if check.charge:
        call.on_abandoned = partial(_refund_abandoned, check)
    return call


def _refund_abandoned(check: Check, reply: Any) -> None:
    if isinstance(reply, list):  # an error charged nothing
        refund_later([(check, reply)])


async def _arefund_all(receipts: list[Any]) -> Refunded:
    units, calls, policies = _take(receipts)
    return total(
        await backend.aexecute_each(backend.topology(), calls) if calls else [],
        policies,
        units,
    )


def _take(receipts: list[Any]) -> tuple[int, list[Call], set[str]]:
    """Take all receipts out of their list: `pop` is atomic, so each is refunded by one caller.

    Refund what this process counted; return these units, the calls that refund the rest, and the names of the policies.
    """
    units, calls, policies = 0, [], set()
    with suppress(IndexError):  # none is left
        while True:
            receipt = receipts.pop()
            if isinstance(receipt, LocalReceipt):
                units += receipt.refund()
                continue
            keys, words = charges(*receipt)
            policies |= receipt[0].policy_set.names
            if keys:
                calls.append(refund_call(keys, words))
    return units, calls, policies


def total(results: Iterable[Any], policies: Iterable[str], units: int = 0) -> Refunded:
    """Return the units that refunds of these policies gave, and why others failed: a slot may be unavailable."""
    error = None
    for result in results:
        if isinstance(result, UnavailableError):
            error = result
        else:
            units += sum(result)
    cached_refusals().invalidate(policies)
    return units, error


def is_refunded(result: Refunded) -> bool:
    """Return whether there was anything to refund; raise what kept it from being refunded."""
    refunded, error = result
    if error is not None:
        raise error
    return refunded > 0


def charges(check: Check, reply: list[Any]) -> tuple[list[str], list[Any]]:
    """Return what a check charged, by its reply: the keys of the counters, and the arguments of their refund."""
    keys, words = [], [check.unique, check.cost]
    charged = reply[CHARGED_AT : REPLY_SIZE * len(check.identities) + 1 : REPLY_SIZE]
    every = zip(
        check.policy_set.keys(check.identities),
        decided_arguments(check, reply),
        charged,
        strict=True,
    )
    for key, arguments, charged_at in every:
        if charged_at >= 0:
            keys.append(key)
            words += (*arguments, charged_at)
    return keys, words


def decided_arguments(check: Check, reply: list[Any]) -> list[ScriptArguments]:
    """Return the arguments of each policy with the limit that it was decided with, which an override may change."""
    end = REPLY_SIZE * len(check.identities) + 1
    capacities, limits = reply[LIMIT:end:REPLY_SIZE], reply[end:]
    return [
        arguments._replace(
            limit=limits[i] if limits else capacities[i], capacity=capacities[i]
        )
        if limits or capacities[i] != arguments.capacity
        else arguments
        for i, arguments in enumerate(check.policy_set.arguments)
    ]


def refund_call(keys: Sequence[str], words: Sequence[Any]) -> Call:
    """Return the call that refunds charges: `words` are the unique id, the cost, and per policy CHARGE_SIZE words.

    The last key may be that of a marker, and the last word its ttl.
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
