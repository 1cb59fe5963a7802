"""What is decided without Redis: by each policy's `on_failure`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import conf
from .local import Answer, Memory, Question
from .policy import Outcome, Policy, Terms, seconds

RETRY_AFTER = 1.0  # seconds; what a client is told when a closed policy cannot be decided

memory = Memory()  # of this process


class Case(NamedTuple):
    """A policy and whom it counts, as Redis would have been asked."""

    policy: Policy
    identity: str
    terms: Terms


class Receipt(NamedTuple):
    """What `give_back` needs."""

    question: Question
    cost: int
    charged_at: int


def decide(cases: Sequence[Case], cost: int, now: int | None, charge: bool) -> tuple[list[Outcome], list[Receipt]]:
    """Open policies let the request pass, closed ones refuse it, local ones count in this process."""
    config = conf.config()
    counted = [case for case in cases if case.policy.on_failure == "local"]
    charge = charge and not any(case.policy.on_failure == "closed" and not case.policy.shadow for case in cases)
    questions = [_question(case, config.local_share) for case in counted]
    answers = iter(memory.check(questions, _clock(now), cost, charge, config.local_identities))
    outcomes, receipts = [], []
    for case in cases:
        if case.policy.on_failure != "local":
            outcomes.append(unasked(case.policy, case.identity, degraded=True))
            continue
        question, answer = _question(case, config.local_share), next(answers)
        outcomes.append(_outcome(case, question, answer))
        if answer.charged_at >= 0:
            receipts.append(Receipt(question, cost, answer.charged_at))
    return outcomes, receipts


def give_back(receipt: Receipt, now: int | None) -> int:
    return memory.refund(receipt.question, _clock(now), receipt.cost, receipt.charged_at)


def unasked(policy: Policy, identity: str, degraded: bool = False) -> Outcome:
    """An outcome that nobody counted."""
    allowed = not (degraded and policy.on_failure == "closed")
    limit, window = policy.capacity, policy.window
    wait = 0.0 if allowed else RETRY_AFTER
    return Outcome(policy, identity, allowed, limit, 0, limit, wait, 0.0, window, degraded)


def _question(case: Case, share: int) -> Question:
    """Of so many processes each may admit its share, and one at least."""
    algo, limit, window, capacity = case.terms
    limit, capacity = max(1, limit // share), max(1, capacity // share)
    return Question(case.policy.name, case.identity, algo, limit, window, capacity, case.policy.shadow)


def _outcome(case: Case, question: Question, answer: Answer) -> Outcome:
    return Outcome(
        case.policy,
        case.identity,
        answer.allowed,
        question.capacity,
        answer.count,
        answer.remaining,
        seconds(answer.retry_after),
        seconds(answer.reset_after),
        case.policy.window,
        degraded=True,
    )


def _clock(now: Any) -> int:
    return time.time_ns() // 1_000_000 if now is None else now
