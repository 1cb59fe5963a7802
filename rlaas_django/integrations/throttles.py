"""What throttles for other frameworks have in common.

A throttle has `plan_check(request, checked, *view)`, which returns the check to make,
or None where it does not limit the request. `checked` has the names of the policies
that others check; only REST framework gives throttles the view. The checks of several
throttles are decided in one round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, ClassVar

from .. import conf, limiter, signals
from ..core.algorithms import SLIDING_WINDOW_COMPACT, Algo
from ..core.decision import Decision, Outcome, combine, strictest
from ..core.keys import encode_name
from ..core.policy import DEFAULT, OnFailure, Policy, Rate
from ..http.gate import plan_check
from ..http.headers import whole_wait
from ..http.identity import user_name
from ..http.limits import Limits, compile_limits
from ..http.proxies import client_address
from ..http.refusals import SUPPRESSED
from ..http.request_state import exceeds_limit, state_of
from ..http.view_names import policy_name
from ..limiter import Check, compile_policies
from ..runtime import log, registry
from ..runtime.clock import frozen_clock

# Of a gate that only has its request observed at the end.
NO_LIMITS = Limits(())

# How the frameworks write a key, unless the site has changed it.
CACHE_FORMAT = "throttle_%(scope)s_%(ident)s"


class CommonThrottle:
    """What throttles of every framework have.

    They have the framework's settings, and the decision about the last request, if any.
    """

    def get_ident(self: Any, request: Any) -> Any:
        """Return the address by TRUSTED_PROXIES, unless NUM_PROXIES is set."""
        if self.framework_settings.NUM_PROXIES is None:
            return client_address(request)
        return super().get_ident(request)  # type: ignore[misc]

    def wait(self: Any) -> float | None:
        """Return the seconds until the next request, as the frameworks do.

        After a refusal, until it would pass; after an admitted request, the window
        shared among the requests that are left.
        """
        decision: Decision | None = self.decision
        if decision is not None:
            if decision.allowed:
                return decision.reset_after / (decision.remaining + 1)
            return whole_wait(decision)

        if hasattr(self, "history"):  # which their own tests set
            return super().wait()  # type: ignore[misc, no-any-return]
        return None


class PolicyLimits:
    """What a throttle checks that names policies, or the default one.

    Without a name it is not registered, as that of a class to inherit from.
    """

    def __init__(self, name: str, policies: Iterable[str | Policy]) -> None:
        self.name = name
        self._limits = Limits(tuple(policies) or (DEFAULT,))
        if name:
            registry.sources.add(self)

    def limits(self) -> list[registry.LimitedView]:
        """Return them for the registry."""
        return [registry.LimitedView(self.name, self._limits.policies, {})]

    def plan_check(self, request: Any, checked: set[str]) -> Check | None:
        """Plan the check of the policies that are not checked already."""
        compiled = compile_limits(self._limits)
        outcomes = state_of(request).outcomes

        return plan_check(compiled, request, checked.union(outcomes))

    def calls_site(self) -> bool:
        """Return whether planning calls functions of the site."""
        return compile_limits(self._limits).calls_site_functions

    def decision_about(self, request: Any) -> Decision | None:
        """Return what was decided about a request, whichever limits checked it."""
        outcomes = state_of(request).outcomes
        names = compile_limits(self._limits).names

        return combine(outcomes[name] for name in names if name in outcomes)


class RateThrottle:
    """What a framework's SimpleRateThrottle gets: a policy for its rate."""

    framework: str
    algo: Algo | None = SLIDING_WINDOW_COMPACT
    on_failure: OnFailure = "open"

    # For each `get_cache_key` of the framework, a function of the throttle and the
    # arguments of that one. It returns the kind and the name of who is counted instead
    # of the key, so that overrides of users and addresses apply.
    names: ClassVar[dict[Any, Any]]

    def parse_rate(self, rate: str | None) -> tuple[int | None, int | None]:
        if rate is None:
            return None, None

        parsed = Rate.parse(rate)
        return parsed.limit, parsed.window

    def calls_site(self: Any) -> bool:
        """Return whether the key is the site's own."""
        if "get_cache_key" in vars(self) or self.cache_format != CACHE_FORMAT:
            return True

        return type(self).get_cache_key not in self.names

    def plan_check(
        self: Any, request: Any, checked: set[str], *view: Any
    ) -> Check | None:
        """Plan the check; None for a request that is not throttled."""
        if self.rate is None:
            return None

        if self.calls_site():
            kind = "key"
            name = self.get_cache_key(request, *view)
        else:
            kind, name = self.names[type(self).get_cache_key](self, request, *view)

        if name is None:
            return None

        identity = encode_name(kind, str(name), conf.config().encoding)
        policy = registry.add_adapter_policy(self._policy())
        return limiter.plan_encoded(compile_policies(policy), (identity,), 1)

    def _policy(self: Any) -> Policy:
        ending = ""
        if self.rate != self.THROTTLE_RATES.get(self.scope):
            # Throttles with rates of their own may have inherited the same scope.
            ending = f"-{self.duration}s"

        scope = self.scope or type(self).__name__
        name = f"{self.framework}.{scope}"
        rate = (self.num_requests, self.duration)
        return _make_policy(name, ending, rate, self.algo, self.on_failure)


@lru_cache(maxsize=1024)
def _make_policy(
    name: str,
    ending: str,
    rate: tuple[int, int],
    algo: Algo | None,
    on_failure: OnFailure,
) -> Policy:
    full_name = policy_name(name, ending)
    return Policy(full_name, rate, algo=algo, on_failure=on_failure)


def anonymous_address(throttle: Any, *arguments: Any) -> tuple[str, Any]:
    """Return the address of a client whom the framework does not know."""
    if throttle.get_cache_key(*arguments) is None:
        return "ip", None

    return "ip", throttle.get_ident(arguments[0])


def user_or_address(throttle: Any, request: Any, *_: Any) -> tuple[str, Any]:
    """Return the user, or the address of a client that is not logged in."""
    user = request.user
    if user and user.is_authenticated:
        name = user_name(user)
        if name:
            return "user", name

    return "ip", throttle.get_ident(request)


def plan_checks(throttles: Iterable[Any], request: Any, *view: Any) -> dict[Any, Check]:
    """Plan the check of each throttle; a policy that several name is checked once."""
    checks: dict[Any, Check] = {}
    checked: set[str] = set()
    for throttle in throttles:
        check = throttle.plan_check(request, checked, *view)
        if check is not None:
            checks[throttle] = check
            checked |= check.policy_set.names

    return checks


def decide(request: Any, checks: dict[Any, Check]) -> dict[Any, Decision]:
    """Decide the checks of throttles, and keep the decisions with the request."""
    if not checks:
        return {}

    timer = _timer_of_a_test(checks)
    if timer is None:
        decisions = limiter.check_each([*checks.values()])
    else:
        with frozen_clock(round(timer() * 1000)):
            decisions = limiter.check_each([*checks.values()])
    record(request, decisions)

    return dict(zip(checks, decisions, strict=True))


async def adecide(request: Any, checks: dict[Any, Check]) -> dict[Any, Decision]:
    """As `decide`, natively async."""
    # The clock of a test stands still for all tasks, so that it is not awaited in.
    if not checks or _timer_of_a_test(checks) is not None:
        return decide(request, checks)

    decisions = await limiter.acheck_each([*checks.values()])
    exceeding = _keep(request, decisions)
    if exceeding is not None:
        await signals.asend(signals.rate_limited, request=request, decision=exceeding)

    return dict(zip(checks, decisions, strict=True))


def _timer_of_a_test(throttles: Iterable[Any]) -> Callable[[], float] | None:
    """Return what a test has put in place of the `timer` of a throttle, if any."""
    for throttle in throttles:
        timer: Callable[[], float] = getattr(throttle, "timer", time.time)
        if timer is not time.time:
            return timer
    return None


def record(request: Any, decisions: Iterable[Decision]) -> None:
    """Keep decisions with the request, and signal if one exceeds a limit."""
    exceeding = _keep(request, decisions)
    if exceeding is not None:
        signals.send(signals.rate_limited, request=request, decision=exceeding)


def _keep(request: Any, decisions: Iterable[Decision]) -> Decision | None:
    """Keep decisions with the request; return them as one if a limit is exceeded.

    Outside of any limits, they are observed at once.
    """
    state = state_of(request)
    outcomes: list[Outcome] = []
    for decision in decisions:
        state.add(decision, cost=1)
        outcomes += decision.outcomes

    combined: Decision = combine(outcomes)  # type: ignore[assignment]
    if not combined.allowed:
        state.refusal = combined

    exceeding = [outcome for outcome in outcomes if exceeds_limit(outcome)]
    if exceeding:
        method = request.method or ""
        if log.refusal(strictest(exceeding), method, request.path, block=True):
            request.META[SUPPRESSED] = True

    if state.depth == 0:
        state.observe()

    if not exceeding:
        return None
    return combined
