"""Check, peek, refund and reset, with the async twins."""

from .adjusting import arefund, refund, refund_later, refund_units
from .checking import (
    aacquire,
    acheck,
    acheck_each,
    acquire,
    adecide,
    apeek,
    areset,
    check,
    check_each,
    decide,
    decide_by_redis,
    peek,
    peek_each,
    peek_planned,
    reset,
    unlimited,
)
from .plan import Check, plan, plan_encoded
from .policy_set import PolicySet, compile_policies

__all__ = [
    "Check",
    "PolicySet",
    "aacquire",
    "acheck",
    "acheck_each",
    "acquire",
    "adecide",
    "apeek",
    "arefund",
    "areset",
    "check",
    "check_each",
    "compile_policies",
    "decide",
    "decide_by_redis",
    "peek",
    "peek_each",
    "peek_planned",
    "plan",
    "plan_encoded",
    "refund",
    "refund_later",
    "refund_units",
    "reset",
    "unlimited",
]
