"""One request before its policies: ask what was not asked yet, refuse or go on, and tell what was decided.

A decorator is a gate, and so is a rule of the middleware. What was decided stays on the request, so that a policy that
several of them name is charged once, and a refusal gives back what gates before it charged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.functional import SimpleLazyObject, empty

from . import backend, conf, limiter, log, refusals, responses, signals, stats
from .identity import Id, Requester, asks_the_site, identify, needs_user
from .policy import DEFAULT, Decision, Outcome, Policy, PolicyError, Rate, Repeated, shown, strictest, undecided

Respond = Callable[[HttpRequest, Decision], Any]


class Asked(NamedTuple):
    """A gate's policies under these settings, and what they take to be asked."""

    config: conf.Config
    policies: tuple[Policy, ...]
    needs_user: bool
    asks_the_site: bool


@dataclass(slots=True)
class Gate:
    """What a decorator or a rule asks of a request."""

    policies: tuple[str | Policy, ...]
    cost: int | Callable[[HttpRequest], int] = 1
    methods: frozenset[str] | None = None
    block: bool = True
    response: Respond | None = None
    charge_when: Callable[[HttpResponseBase], Any] | None = None
    charge_on_error: bool = True
    _asked: Asked | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.charge_when is not None or not self.charge_on_error:
            refusals.refundable.update(str(policy) for policy in self.policies)

    def asked(self, config: conf.Config) -> Asked:
        """Found out once for as long as the settings stay."""
        asked = self._asked
        if asked is None or asked.config is not config:
            policies = tuple([config.policy(each) if isinstance(each, str) else each for each in self.policies])
            site = callable(self.cost) or any(map(asks_the_site, policies))
            user = site or any(map(needs_user, policies))
            asked = self._asked = Asked(config, policies, user, site)
        return asked


class Visit:
    """What was decided about a request so far."""

    __slots__ = ("_outcomes", "_read", "charges", "whole")

    def __init__(self) -> None:
        self.charges: list[tuple[Decision, int]] = []  # with the cost
        self.whole: Decision | None = None  # all of them as one, once somebody wanted it
        self._outcomes: dict[str, Outcome] = {}
        self._read = 0  # of so many charges

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """By the policies' names; of one decision alone nobody asks for them."""
        for decision, _ in self.charges[self._read :]:
            self._outcomes.update({outcome.policy.name: outcome for outcome in decision.outcomes})
        self._read = len(self.charges)
        return self._outcomes

    def add(self, decision: Decision, cost: int) -> None:
        self.whole = None if self.charges else decision
        self.charges.append((decision, cost))

    def decision(self, names: Collection[str] | None = None) -> Decision | None:
        """As one decision: of these policies, or of all."""
        if names is not None and len(names) < len(self.outcomes):
            return _as_one([outcome for name, outcome in self.outcomes.items() if name in names])
        if self.whole is None:
            self.whole = _as_one(self.outcomes.values())
        return self.whole

    def given_back(self, decision: Decision, cost: int) -> None:
        """The figures that a client is told after a refund."""
        for outcome in decision.outcomes:
            restored = min(outcome.limit, outcome.remaining + cost) if outcome.allowed else 0
            self.outcomes[outcome.policy.name] = outcome._replace(remaining=max(outcome.remaining, restored))
        self.whole = None


def _as_one(outcomes: Iterable[Outcome]) -> Decision | None:
    told = tuple(outcomes)
    return Decision(all(each.allowed or each.policy.shadow for each in told), told) if told else None


def visit_of(request: HttpRequest) -> Visit:
    """The request's own, also when Django REST framework has wrapped it."""
    bare: Any = getattr(request, "_request", request)
    visit: Visit | None = getattr(bare, "_rlaas_visit", None)
    if visit is None:
        visit = bare._rlaas_visit = Visit()
        _annotate(request, None)
    return visit


def _annotate(request: HttpRequest, decision: Decision | None) -> None:
    bare: Any = getattr(request, "_request", request)
    bare.rate_limit = decision
    if bare is not request:
        request.rate_limit = decision  # type: ignore[attr-defined]


def enter(
    gate: Gate, request: HttpRequest, view: Callable[..., HttpResponseBase], /, *args: Any, **kwargs: Any
) -> HttpResponseBase:
    """The view's response, or a refusal."""
    passage = Passage(gate, request)
    refusal: HttpResponseBase | None = _do(passage.before())
    if refusal is not None:
        return refusal
    try:
        response = view(*args, **kwargs)
    except Exception:
        if not gate.charge_on_error:
            _do(passage.give_back())
        raise
    if passage.is_free(response):
        _do(passage.give_back())
    passage.add_headers(response)
    return response


async def aenter(
    gate: Gate, request: HttpRequest, view: Callable[..., Awaitable[HttpResponseBase]], /, *args: Any, **kwargs: Any
) -> HttpResponseBase:
    """As `enter`, natively async."""
    passage = Passage(gate, request)
    refusal: HttpResponseBase | None = await _ado(passage.before())
    if refusal is not None:
        return refusal
    try:
        response = await view(*args, **kwargs)
    except Exception:
        if not gate.charge_on_error:
            await _ado(passage.give_back())
        raise
    if passage.is_free(response):
        await _ado(passage.give_back())
    passage.add_headers(response)
    return response


# Something that a passage wants done: by the function, or by its async twin; and what they are given.
Step = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Steps = Generator[Step, Any, Any]


def _do(steps: Steps) -> Any:
    result = None
    while True:
        try:
            function, _, args, options = steps.send(result)
        except StopIteration as done:  # of the steps; one out of a function of the site's passes below
            return done.value
        result = function(*args, **options)


async def _ado(steps: Steps) -> Any:
    result = None
    while True:
        try:
            _, twin, args, options = steps.send(result)
        except StopIteration as done:
            return done.value
        result = await twin(*args, **options)


class Passage:
    """One request through one gate; what is sync and async alike."""

    __slots__ = ("config", "decision", "gate", "left_out", "request", "visit")

    def __init__(self, gate: Gate, request: HttpRequest) -> None:
        self.gate, self.request, self.config = gate, request, conf.config()
        self.visit = visit_of(request)
        self.decision: Decision | None = None
        self.left_out = False  # of the log, as there was no room for another line

    def before(self) -> Steps:
        """Ask; the refusal, or None to go on."""
        gate, request, visit = self.gate, self.request, self.visit
        mine, alone = None, False
        if self.config.enabled and (gate.methods is None or request.method in gate.methods):
            asked = gate.asked(self.config)
            if asked.needs_user and (asked.asks_the_site or _is_user_unknown(request)):
                who, policies, cost = yield from self._question(asked)
            else:
                who, policies, cost = Requester(request), asked.policies, _cost(gate, request)
            fresh = self._fresh(policies)
            if fresh:
                # One policy is asked about by the identity as it is counted, which is the quickest to be looked up.
                whom = (Id(identify(who, fresh[0])), fresh[0]) if len(fresh) == 1 else (who, fresh)
                self.decision = yield limiter.check, limiter.acheck, whom, {"cost": cost}
                if self._record(self.decision, cost) and signals.rate_limited.receivers:
                    facts = {"request": request, "decision": self.decision}
                    yield signals.tell, signals.atell, (signals.rate_limited,), facts
            alone = self.decision is not None and len(visit.charges) == 1
            mine = self.decision if alone else visit.decision({policy.name for policy in policies})
        if not visit.charges:
            _annotate(request, limiter.unlimited())
        if mine is None or mine.allowed or not gate.block:
            return None
        if not alone:
            # A refused request costs nothing, so what gates before this one charged goes back.
            for earlier, price in visit.charges:
                yield from self._give_back(earlier, price)
        response = self._refusal(mine) or (yield from self._respond(mine))
        if not alone:
            responses.add_headers(response, visit.decision())
        return response

    def _fresh(self, policies: Sequence[Policy]) -> Sequence[Policy]:
        """Those that were not asked about yet."""
        if not self.visit.charges:
            return policies
        return [policy for policy in policies if policy.name not in self.visit.outcomes]

    def _question(self, asked: Asked) -> Steps:
        """Who asks, under which policies, at what cost, where the database may have to be asked about that."""
        request = self.request
        if _is_user_unknown(request):
            yield _leave_user, _load_user, (request,), {}
        arguments = self.gate, request, asked.policies
        if asked.asks_the_site:  # and async code must leave its functions to a thread
            return (yield _question, _in_a_thread(_question), arguments, {})
        return _question(*arguments)

    def _refusal(self, decision: Decision) -> HttpResponseBase | None:
        """Ours, unless the site has its own or a template is to render it: these may ask the database."""
        if self.gate.response or self.config.response:
            return None
        response = responses.plain_refusal(self.request, decision)
        if response is not None and self.left_out:
            responses.leave_out_of_log(response)
        return response

    def _respond(self, decision: Decision) -> Steps:
        own = self.gate.response or self.config.response
        response = yield *(_both(own) if own else _PAGE), (self.request, decision), {}
        if not getattr(response, "is_rendered", True):  # Django renders a view's response, not a middleware's
            response = yield response.render, sync_to_async(response.render), (), {}
        if self.left_out and not own:
            responses.leave_out_of_log(response)
        responses.add_refusal_headers(response, decision)
        responses.add_headers(response, decision)
        return response

    def is_free(self, response: HttpResponseBase) -> bool:
        charge_when = self.gate.charge_when
        if charge_when is None or self.decision is None or not isinstance(response, HttpResponseBase):
            return False
        return not charge_when(response)

    def give_back(self) -> Steps:
        for decision, cost in self.visit.charges:
            if decision is self.decision:
                yield from self._give_back(decision, cost)

    def _give_back(self, decision: Decision, cost: int) -> Steps:
        if decision.allowed and (yield _refund, _arefund, (decision,), {}):
            self.visit.given_back(decision, cost)
            _annotate(self.request, self.visit.decision())

    def _record(self, decision: Decision, cost: int) -> bool:
        """Whether a policy refused, or a shadow would have."""
        request, visit = self.request, self.visit
        visit.add(decision, cost)
        _annotate(request, visit.decision())
        stats.record(decision, request.method or "", request.path)
        if not (isinstance(decision, Repeated) or _refused(decision)):  # the one is a refusal by a limit, always
            return False
        if log.has_room(logging.WARNING):
            _log(request, strictest(_refused(decision)), self.gate.block)
        else:
            self.left_out = log.logger.isEnabledFor(logging.WARNING)
        return True

    def add_headers(self, response: HttpResponseBase) -> None:
        if isinstance(response, HttpResponseBase):  # else Django tells the view's author
            responses.add_headers(response, self.visit.decision())


def _refused(decision: Decision) -> list[Outcome]:
    return [each for each in decision.outcomes if not each.allowed and not undecided(each)]


def _is_user_unknown(request: HttpRequest) -> bool:
    """Whether `request.user` is still to be found out, which only the session's can be without being read."""
    user = getattr(request, "user", None)
    return isinstance(user, SimpleLazyObject) and user._wrapped is empty and hasattr(request, "auser")


def _leave_user(request: HttpRequest) -> None:
    """Sync code reads `request.user` itself, and only if it must."""


async def _load_user(request: HttpRequest) -> None:
    """Async code must not reach the database through a `request.user` that is still to be found out."""
    request.user = await request.auser()


def _question(gate: Gate, request: HttpRequest, policies: Sequence[Policy]) -> tuple[Requester, Sequence[Policy], int]:
    """Who asks, under which policies, at what cost; whatever the site's functions have to say is said here."""
    who = Requester(request)
    resolved = [found for policy in policies if (found := _resolved(policy, request))]
    for policy in resolved:
        who.ask(policy.key)
    return who, resolved, _cost(gate, request)


def _resolved(policy: Policy, request: HttpRequest) -> Policy | None:
    """The policy with the rate that holds for this request; None when there is no limit."""
    if isinstance(policy.rate, Rate):
        return policy
    rate = policy.rate(request)
    if rate is None:
        return None
    try:
        return _with_rate(policy, Rate.parse(rate))
    except PolicyError as error:
        log.error("The rate of policy %s: %s The default policy's rate holds instead.", policy, error)
        return _with_rate(policy, conf.config().policy(DEFAULT).fixed_rate)


@lru_cache(maxsize=1024)
def _with_rate(policy: Policy, rate: Rate) -> Policy:
    return replace(policy, rate=rate)


def _cost(gate: Gate, request: HttpRequest) -> int:
    cost = gate.cost(request) if callable(gate.cost) else gate.cost
    if type(cost) is int and cost >= 0:
        return cost
    log.error("The cost %s is not a whole number of at least 0; it is taken for 1.", shown(cost))
    return 1


def _refund(decision: Decision) -> bool:
    try:
        return limiter.refund(decision)
    except backend.UnavailableError:
        return False  # what was charged ends with its window


async def _arefund(decision: Decision) -> bool:
    try:
        return await limiter.arefund(decision)
    except backend.UnavailableError:
        return False


def _both(respond: Respond) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A site's own response may come from a sync or an async function, and is wanted both ways."""
    if iscoroutinefunction(respond):
        return async_to_sync(respond), respond
    return respond, _in_a_thread(respond)


def _in_a_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    @sync_to_async
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except StopIteration as error:  # a future cannot carry one, and would never end
            raise RuntimeError(f"{function!r} raised StopIteration.") from error

    return run


_PAGE = _both(responses.page)


def _log(request: HttpRequest, outcome: Outcome, block: bool) -> None:
    what = "refused" if block else "over the limit"
    log.logger.warning(
        "%s policy=%s identity=%s count=%d/%d retry_after=%.3f %s %s",
        "would be refused" if outcome.policy.shadow else what,
        outcome.policy,
        outcome.identity,
        outcome.current_count,
        outcome.limit,
        outcome.retry_after,
        log.escaped(request.method or ""),
        log.escaped(request.path),
    )
