"""Rate limiting for Django: exact decisions in one Redis round trip."""

from .core.algorithms import Algo
from .core.decision import Decision, Outcome
from .core.policy import OnFailure, Policy, PolicyError, Rate
from .decorators import RateLimitedRequest, rate_limit, rate_limit_exempt
from .http.login import login_failed
from .limiter import (
    aacquire,
    acheck,
    acquire,
    apeek,
    arefund,
    areset,
    check,
    peek,
    refund,
    reset,
)

__version__ = "0.1.0"

__all__ = [
    "Algo",
    "Decision",
    "OnFailure",
    "Outcome",
    "Policy",
    "PolicyError",
    "Rate",
    "RateLimitedRequest",
    "aacquire",
    "acheck",
    "acquire",
    "apeek",
    "arefund",
    "areset",
    "check",
    "login_failed",
    "peek",
    "rate_limit",
    "rate_limit_exempt",
    "refund",
    "reset",
]
