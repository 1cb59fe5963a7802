"""Rate limiting for Django: exact decisions in one Redis round trip."""

from .decorators import rate_limit
from .limiter import acheck, apeek, arefund, areset, check, peek, refund, reset
from .policy import Decision, Outcome, Policy, PolicyError, Rate

__version__ = "0.1.0"

__all__ = [
    "Decision",
    "Outcome",
    "Policy",
    "PolicyError",
    "Rate",
    "acheck",
    "apeek",
    "arefund",
    "areset",
    "check",
    "peek",
    "rate_limit",
    "refund",
    "reset",
]
