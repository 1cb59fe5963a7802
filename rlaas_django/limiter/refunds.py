"""Refunds of what checks charged, once each; those of cancelled requests run in tasks of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from .. import backend
from ..backend import Call, UnavailableError, script_call
from ..backend.scripts import for_algorithms
from ..core.clock import script_time
from ..core.decision import Decision
from ..core.policy import ScriptArguments
from .compiled import CHARGED_AT, LIMIT, REPLY_SIZE, Check
from .fallback import LocalReceipt
from .refusal_cache import cached_refusals

# What a refund takes for each policy, after the check's unique id and cost: the policy's ScriptArguments, charged_at
CHARGE_SIZE = 6
Refunded = tuple[int, UnavailableError | None]  # units, and why others were not refunded

_tasks: set[asyncio.Task[Refunded]] = set()  # an event loop keeps weak references only


def refund(decision: Decision) -> bool:
    """Refund what a decision charged, once; return False when there is nothing (more) to refund.

    A unit that has left its window meanwhile is not refunded a second time.
    """
    return _is_refunded(refund_all(decision.receipts))


async def arefund(decision: Decision) -> bool:
    """As `refund`, natively async. The refund is made, even if the caller is cancelled meanwhile."""
    return _is_refunded(await arefund_all(decision.receipts))


def refund_all(receipts: list[Any]) -> Refunded:
    """Refund what is not refunded yet: receipts are taken out of the list one by one."""
    refunded, error = 0, None
    for receipt in _take(receipts):
        try:
            refunded += receipt.refund() if isinstance(receipt, LocalReceipt) else _refund(*receipt)
        except UnavailableError as failure:
            error = failure  # in a cluster, other slots may be available
    return refunded, error


async def arefund_all(receipts: list[Any]) -> Refunded:
    """As `refund_all`, natively async; a caller that is cancelled does not stop it."""
    return await asyncio.shield(refund_later(receipts)) if receipts else (0, None)


def refund_later(receipts: list[Any]) -> asyncio.Task[Refunded]:
    """Refund in a task of its own: in one that was cancelled, the next `await` may be cancelled, too."""
    task = asyncio.get_running_loop().create_task(_arefund_all(receipts))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def refund_abandoned(decision: Any) -> None:
    """Refund what a check charged whose caller was cancelled before the decision came."""
    if isinstance(decision, Decision):  # an error charged nothing
        refund_later(decision.receipts)


async def _arefund_all(receipts: list[Any]) -> Refunded:
    refunded, error = 0, None
    for receipt in _take(receipts):
        try:
            refunded += receipt.refund() if isinstance(receipt, LocalReceipt) else await _arefund(*receipt)
        except UnavailableError as failure:
            error = failure
    return refunded, error


def _is_refunded(result: Refunded) -> bool:
    refunded, error = result
    if error is not None:
        raise error
    return refunded > 0


def _take(receipts: list[Any]) -> Iterator[Any]:
    """Take receipts out of their list: `pop` is atomic, so each is refunded by one caller."""
    while True:
        try:
            yield receipts.pop()
        except IndexError:
            return


def charges(check: Check, reply: list[Any]) -> tuple[list[str], list[Any]]:
    """Return what a check charged, by its reply: the keys of the counters, and the arguments of their refund."""
    keys, words = [], [check.unique, check.cost]
    charged = reply[CHARGED_AT : REPLY_SIZE * len(check.identities) + 1 : REPLY_SIZE]
    every = zip(check.policy_set.keys(check.identities), decided_arguments(check, reply), charged, strict=True)
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
        arguments._replace(limit=limits[i] if limits else capacities[i], capacity=capacities[i])
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
    return script_call(for_algorithms(algorithms), keys, (script_time(), "refund", *words), is_refund=True)


def _refund(check: Check, reply: list[Any]) -> int:
    keys, words = charges(check, reply)
    # Not by the check's own topology: this may be a fork of its process, which must not use its connections.
    refunded = sum(backend.execute(backend.topology(), refund_call(keys, words))) if keys else 0
    cached_refusals().invalidate(check.policy_set.names)
    return int(refunded)


async def _arefund(check: Check, reply: list[Any]) -> int:
    keys, words = charges(check, reply)
    refunded = sum(await backend.aexecute(backend.topology(), refund_call(keys, words))) if keys else 0
    cached_refusals().invalidate(check.policy_set.names)
    return int(refunded)
