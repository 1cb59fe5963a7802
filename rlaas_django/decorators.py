"""@rate_limit, for views of every kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.decorators import method_decorator

from . import conf
from .core.decision import Decision
from .core.policy import (
    DEFAULT,
    NAME,
    RATE_FORMS,
    KeyFunction,
    Policy,
    PolicyError,
    Rate,
    RateFunction,
    RateLike,
)
from .core.request_options import (
    check_cost,
    check_function,
    cost_problem,
    parse_methods,
)
from .http.gate import aenter, enter
from .http.limits import Limits
from .http.view_names import (
    owner_of,
    policy_name,
    view_class_of,
    view_label,
    view_name,
)
from .runtime import registry
from .runtime.registry import LimitedView

View = Callable[..., Any]
ViewT = TypeVar("ViewT", bound=View)  # a function, or a class
Options = dict[str, Any]


class RateLimitedRequest(HttpRequest):
    """The request of a limited view, for annotations."""

    rate_limit: Decision


@overload
def rate_limit(view: ViewT, /) -> ViewT: ...
@overload
def rate_limit(
    *limits: RateLike | Policy,
    rate: RateLike | RateFunction | None = None,
    key: str | KeyFunction | None = None,
    method: str | Iterable[str] | None = None,
    cost: int | Callable[[Any], int] | str = 1,
    group: str | None = None,
    label: str | None = None,
    algo: str | None = None,
    burst: int | None = None,
    on_failure: str | None = None,
    block: bool = True,
    shadow: bool = False,
    charge_when: Callable[[Any], Any] | str | None = None,
    charge_on_error: bool = True,
    response: Callable[[Any, Decision], Any] | str | None = None,
) -> RateLimit: ...
def rate_limit(
    *limits: Any,
    rate: Any = None,
    key: str | KeyFunction | None = None,
    method: str | Iterable[str] | None = None,
    cost: int | Callable[[Any], int] | str = 1,
    group: str | None = None,
    label: str | None = None,
    algo: str | None = None,
    burst: int | None = None,
    on_failure: str | None = None,
    block: bool = True,
    shadow: bool = False,
    charge_when: Callable[[Any], Any] | str | None = None,
    charge_on_error: bool = True,
    response: Callable[[Any, Decision], Any] | str | None = None,
) -> Any:
    """Limit a view: by the default policy, by named ones, or by rates of its own.

    >>> @rate_limit
    >>> @rate_limit("login")
    >>> @rate_limit("5/m", key="ip", method="POST")
    >>> @rate_limit("10/s", "1000/h", key="user")
    >>> @rate_limit(rate=rate_for_request, key="user")
    >>> @rate_limit("5/m", key="ip", charge_when=login_failed)
    """
    policy_options = {
        "key": key,
        "algo": algo,
        "burst": burst,
        "on_failure": on_failure,
        "shadow": shadow or None,
        "label": label,
    }
    request_options: Options = {
        "cost": cost,
        "methods": None,
        "block": block,
        "response": response,
        "charge_when": charge_when,
        "charge_on_error": charge_on_error,
    }
    if method is not None:
        request_options["methods"] = parse_methods(method)

    view = None
    if len(limits) == 1 and callable(limits[0]):
        view = limits[0]
        limits = ()
    if rate is not None:
        limits = (*limits, rate if callable(rate) else Rate.parse(rate))

    decorator = RateLimit(limits, policy_options, group, request_options)
    if view is not None:
        return decorator(view)
    return decorator


def rate_limit_exempt(view: ViewT) -> ViewT:
    """Exempt a view from every middleware rule. Its own decorators still apply.

    >>> @rate_limit_exempt
    >>> def health(request): ...
    """
    exempt: Any = view
    if not isinstance(view, type):
        # A function of its own: the view may be at another URL without this decorator.
        exempt = _same_view(view)
    exempt.rate_limit_exempt = True
    registry.exempt_views.add(view_name(view))
    return exempt  # type: ignore[no-any-return]


def _same_view(view: View) -> View:
    if iscoroutinefunction(view):

        @functools.wraps(view)
        async def same_view(*args: Any, **kwargs: Any) -> Any:
            return await view(*args, **kwargs)
    else:

        @functools.wraps(view)
        def same_view(*args: Any, **kwargs: Any) -> Any:
            return view(*args, **kwargs)

    return same_view


class RateLimit:
    """`@rate_limit(...)` with its arguments parsed, so that a typo fails at import."""

    def __init__(
        self,
        rates: tuple[Any, ...],
        policy_options: Options,
        group: str | None,
        request_options: Options,
    ) -> None:
        self.rates = tuple(map(_parse, rates)) or (DEFAULT,)
        self.named = tuple(rate for rate in self.rates if _is_named(rate))
        self.endings = _endings([rate for rate in self.rates if not _is_named(rate)])
        self.options = {
            option: value
            for option, value in policy_options.items()
            if value is not None
        }
        self.group = group
        self.request_options = request_options
        self.limits_by_view: dict[str, Limits] = {}
        self._view_ids: dict[str, set[int]] = {}  # of the views that have a name
        self._before_authentication: set[str] = set()  # names of views

        conf.require_app()
        self._check_policy_options()
        # The view is not known yet, but what is wrong with a policy is.
        self._unnamed_policies = self._make_policies(group or "view", group or "view")
        self._check_request_options()
        registry.sources.add(self)

    def __call__(self, view: ViewT) -> ViewT:
        limits = self.limits_for(view)
        self._note_view(view)

        limited: Any
        if isinstance(view, type):
            limited = _limited_class(view, limits)
        else:
            limited = _limited_function(view, limits)
        # For the system checks, and for the next decorator on the same view.
        limited.rate_limited_by = (*getattr(view, "rate_limited_by", ()), self)
        return limited  # type: ignore[no-any-return]

    def limits_for(self, view: Any) -> Limits:
        """Return the limits of a view.

        They are kept, because method_decorator decorates anew for each request.
        """
        name = view_name(view)
        if name in self.limits_by_view:
            return self.limits_by_view[name]

        limits = Limits(self._policies_for(view, name), **self.request_options)
        # method_decorator tries a decorator out on a function of its own.
        if view.__module__ != method_decorator.__module__:
            self.limits_by_view[name] = limits
        return limits

    def limits(self) -> list[LimitedView]:
        """Return the views with their policies, for the registry."""
        if not self.limits_by_view:
            # method_decorator shows the view with its first request.
            view = LimitedView(
                "A method",
                self.named,
                self.request_options,
                unnamed=tuple(self._own_policies()),
            )
            return [view]

        shares_on_purpose = self.group is not None or self.named == self.rates
        views = []
        for name, limits in self.limits_by_view.items():
            view_ids: Iterable[int] = ()
            if not shares_on_purpose:
                view_ids = self._view_ids.get(name, ())
            view = LimitedView(
                name,
                limits.policies,
                self.request_options,
                views=frozenset(view_ids),
                before_authentication=name in self._before_authentication,
            )
            views.append(view)
        return views

    def _own_policies(self) -> Iterator[Policy]:
        """Yield the policies of rates of the view's own, before they are named."""
        for policy in self._unnamed_policies:
            if isinstance(policy, Policy) and policy not in self.named:
                yield policy

    def _note_view(self, view: Any) -> None:
        """Note what the system checks ask about a view."""
        name = view_name(view)
        view_class = view_class_of(view)
        # method_decorator decorates anew for each request.
        is_new = isinstance(view, (FunctionType, type))
        if is_new or not hasattr(view, "__wrapped__"):
            # as_view() makes a new function of the same class.
            made_of = view if view_class is None else view_class
            self._view_ids.setdefault(name, set()).add(id(made_of))
        if view_class is not None and registry.adapter_for(view_class) is not None:
            self._before_authentication.add(name)

    def _policies_for(self, view: Any, name: str) -> tuple[str | Policy, ...]:
        """Name the rates after the view, unless they have a group.

        Those of a second decorator on the same view get counters of their own.
        """
        if self.group:
            return self._make_policies(self.group, self.group)

        others = list(_policies_below(view))
        labels = {policy.label for policy in others}
        labels.update(map(str, self.named))
        names = {policy.name for policy in others}
        return self._make_policies(
            self._free_name(name, names), self._free_name(view_label(view), labels)
        )

    def _free_name(self, text: str, taken: set[str]) -> str:
        """Return text, with a number where others have the names made of it."""
        for candidate in _numbered(text):
            names = [policy_name(candidate, ending) for ending in self.endings]
            if taken.isdisjoint(names):
                break
        return candidate

    def _make_policies(self, name: str, label: str) -> tuple[str | Policy, ...]:
        """Return the policies; of several rates each has its window in the name."""
        policies = []
        endings = iter(self.endings)
        for rate in self.rates:
            if _is_named(rate):
                policies.append(rate)
            else:
                policies.append(self._own_policy(rate, name, label, next(endings)))

        names = {str(policy) for policy in policies}
        if len(names) < len(policies):
            listed = ", ".join(map(str, self.rates))
            raise PolicyError(
                f"{listed}: two of these are the same policy, or two rates over the "
                "same window."
            )
        return tuple(policies)

    def _own_policy(self, rate: Any, name: str, label: str, ending: str) -> Policy:
        """Return the policy of a rate of the view's own."""
        shown = policy_name(label, ending)
        if "label" in self.options:
            shown = self.options["label"] + ending
        options = {**self.options, "label": shown}
        return Policy(policy_name(name, ending), rate, **options)

    def _check_policy_options(self) -> None:
        """Raise PolicyError for an option that is not text, or has no rate."""
        texts = {"group": self.group, "label": self.options.get("label")}
        for option, text in texts.items():
            if not isinstance(text, str | None):
                raise PolicyError(f"The {option} {text!r} is not text.")

        options = [*self.options]
        if self.group:
            options.append("group")
        if options and self.named == self.rates:
            listed = ", ".join(repr(str(rate)) for rate in self.rates)
            reason = f"{listed} names a policy"
            if self.rates == (DEFAULT,):
                reason = "there is none"
            raise PolicyError(
                f"{' and '.join(options)}: for a rate of the view's own, but {reason}; "
                f"{RATE_FORMS}, or rate= a function."
            )

    def _check_request_options(self) -> None:
        """Raise PolicyError for an option about requests that is not valid."""
        options = self.request_options
        for option in ("block", "charge_on_error"):
            if type(options[option]) is not bool:
                raise PolicyError(f"{option} {options[option]!r} is not True or False.")
        if options["charge_when"] is not None:
            check_function("charge_when", options["charge_when"])
        if options["response"] is not None:
            check_function("response", options["response"], may_be_async=True)

        check_cost(options["cost"])
        for policy in self._unnamed_policies:
            if isinstance(policy, Policy):
                problem = cost_problem(options["cost"], policy)
                if problem is not None:
                    raise PolicyError(f"{policy.rate}: {problem}")


def _parse(limit: Any) -> Any:
    """Return the name of a policy, a policy, a rate, or a function that gives one."""
    if isinstance(limit, Policy) or callable(limit):
        return limit
    if not isinstance(limit, str) or "/" in limit:
        return Rate.parse(limit)
    if NAME.fullmatch(limit):
        return limit
    raise PolicyError(
        f"{limit!r} is neither a rate nor the name of a policy; {RATE_FORMS}."
    )


def _is_named(rate: Any) -> bool:
    return isinstance(rate, (str, Policy))


def _endings(rates: list[Any]) -> list[str]:
    """Return what the name of each rate's policy ends in: of several, its window."""
    if len(rates) == 1:
        return [""]
    endings = []
    for number, rate in enumerate(rates, start=1):
        ending = f"-{number}"
        if isinstance(rate, Rate):
            ending = f"-{rate.window}s"
        endings.append(ending)
    return endings


def _policies_below(view: Any) -> Iterator[Policy]:
    """Yield the policies of decorators below on the same view."""
    for decorator in getattr(view, "rate_limited_by", ()):
        for limits in decorator.limits_by_view.values():
            for policy in limits.policies:
                if isinstance(policy, Policy):
                    yield policy


def _numbered(text: str) -> Iterator[str]:
    yield text
    for number in itertools.count(2):
        yield f"{text}-{number}"


def _limited_function(view: View, limits: Limits) -> View:
    run = enter
    # A method of an async class-based view may not be a coroutine function.
    if iscoroutinefunction(view) or _is_async(owner_of(view)[0]):
        run = aenter

    if iscoroutinefunction(view):

        @functools.wraps(view)
        async def limited(*args: Any, **kwargs: Any) -> Any:
            return await run(limits, _request(args, kwargs), view, *args, **kwargs)
    else:

        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            return run(limits, _request(args, kwargs), view, *args, **kwargs)

    return limited


def _limited_class(view_class: type, limits: Limits) -> type:
    adapter = registry.adapter_for(view_class)
    if adapter is not None:
        return adapter.limit_class(view_class, limits)  # type: ignore[no-any-return]

    dispatch = getattr(view_class, "dispatch", None)
    if dispatch is None:
        raise TypeError(
            f"@rate_limit is for views, and {view_class.__qualname__} is not one: it "
            "has no dispatch method."
        )

    @functools.wraps(dispatch)
    def limited(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        run = enter
        if _is_async(self):
            run = aenter
        return run(limits, request, dispatch, self, request, *args, **kwargs)

    view_class.dispatch = limited  # type: ignore[attr-defined]
    return view_class


def _is_async(view: object) -> bool:
    """Return whether the methods of a class-based view are async."""
    return getattr(view, "view_is_async", False)


def _request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the request among a view's arguments, or a method's."""
    for argument in (*args[:2], kwargs.get("request")):
        if hasattr(argument, "META"):
            return argument
    raise TypeError(
        "@rate_limit is for views: there is no request among the arguments. A function "
        "that gives the rate is written as rate=."
    )
