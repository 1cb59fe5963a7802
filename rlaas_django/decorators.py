"""@rate_limit, for views of every kind."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.decorators import method_decorator

from . import conf
from .core.algorithms import Algo
from .core.decision import Decision
from .core.policy import (
    KeyFunction,
    OnFailure,
    Policy,
    PolicyError,
    RateFunction,
    RateLike,
)
from .core.rules import (
    check_cost,
    check_function,
    cost_problem,
    parse_methods,
)
from .http.gate import aenter, enter
from .http.limits import Limits
from .http.view_names import ViewPolicies, owner_of, view_class_of, view_name
from .runtime import registry
from .runtime.registry import LimitedView

View = Callable[..., Any]
ViewT = TypeVar("ViewT", bound=View)  # a function, or a class


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
    algo: Algo | None = None,
    burst: int | None = None,
    on_failure: OnFailure | None = None,
    block: bool = True,
    shadow: bool = False,
    charge_when: Callable[[Any], Any] | str | None = None,
    charge_on_error: bool = True,
    response: Callable[[Any, Decision], Any] | str | None = None,
) -> RateLimit: ...
def rate_limit(
    *limits: Any,
    rate: Any = None,
    key: Any = None,
    method: Any = None,
    cost: Any = 1,
    group: str | None = None,
    label: str | None = None,
    algo: Algo | None = None,
    burst: int | None = None,
    on_failure: OnFailure | None = None,
    block: bool = True,
    shadow: bool = False,
    charge_when: Any = None,
    charge_on_error: bool = True,
    response: Any = None,
) -> Any:
    """Limit a view: by the default policy, by named ones, or by rates of its own.

    >>> @rate_limit
    >>> @rate_limit("login")
    >>> @rate_limit("10/s", "1000/h", key="user")
    >>> @rate_limit(rate=rate_for_request, key="user")
    >>> @rate_limit("5/m", key="ip", method="POST", charge_when=login_failed)
    """
    policy_options = {
        "key": key,
        "algo": algo,
        "burst": burst,
        "on_failure": on_failure,
        "shadow": shadow or None,
        "label": label,
    }
    options = {
        "cost": cost,
        "methods": method,
        "block": block,
        "response": response,
        "charge_when": charge_when,
        "charge_on_error": charge_on_error,
    }
    view = None
    if len(limits) == 1 and callable(limits[0]):
        view = limits[0]
        limits = ()
    policies = ViewPolicies(limits, rate, policy_options, group)
    decorator = RateLimit(policies, options)
    if view is None:
        return decorator
    return decorator(view)


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
    """`@rate_limit(...)`, which limits the views that it is put on."""

    def __init__(self, policies: ViewPolicies, options: dict[str, Any]) -> None:
        conf.require_app()
        self.policies = policies
        self.options = options
        if options["methods"] is not None:
            options["methods"] = parse_methods(options["methods"])
        self._check_options()

        self.limits_by_view: dict[str, Limits] = {}
        # Of the views that have a name, where they do not share counters on purpose.
        self._view_ids: dict[str, set[int]] = defaultdict(set)
        self._before_authentication: set[str] = set()  # names of views
        registry.sources.add(self)

    def __call__(self, view: ViewT) -> ViewT:
        below = getattr(view, "rate_limited_by", ())
        limits = self.limits_for(view, below)
        self._note_view(view)

        limited: Any
        if isinstance(view, type):
            limited = _limited_class(view, limits)
        else:
            limited = _limited_function(view, limits)
        # For the system checks, and for the next decorator on the same view.
        limited.rate_limited_by = (*below, self)
        return limited  # type: ignore[no-any-return]

    def limits_for(self, view: Any, below: Sequence[RateLimit] = ()) -> Limits:
        """Return the limits of a view that has other decorators of ours below.

        They are kept, because method_decorator decorates anew for each request.
        """
        name = view_name(view)
        if name in self.limits_by_view:
            return self.limits_by_view[name]

        # method_decorator shows a view to the outer decorators first.
        policies_below = [
            policy
            for index, decorator in enumerate(below)
            for policy in decorator.limits_for(view, below[:index]).policies
            if isinstance(policy, Policy)
        ]
        policies = self.policies.for_view(view, policies_below)
        limits = Limits(policies, **self.options)
        # method_decorator tries a decorator out on a function of its own.
        if view.__module__ != method_decorator.__module__:
            self.limits_by_view[name] = limits
        return limits

    def limits(self) -> Iterator[LimitedView]:
        """Yield the views with their policies, for the registry."""
        if not self.limits_by_view:
            # method_decorator shows the view with its first request.
            named = self.policies.named
            own = self.policies.own
            yield LimitedView("A method", named, self.options, unnamed=own)

        for name, limits in list(self.limits_by_view.items()):
            yield LimitedView(
                name,
                limits.policies,
                self.options,
                views=frozenset(self._view_ids[name]),
                before_authentication=name in self._before_authentication,
            )

    def _note_view(self, view: Any) -> None:
        """Note what the system checks ask about a view."""
        name = view_name(view)
        view_class = view_class_of(view)
        if not self.policies.is_shared:
            # as_view(), method_decorator and another @rate_limit make new functions.
            original = view_class or inspect.unwrap(view)
            self._view_ids[name].add(id(original))
        if view_class is not None and registry.adapter_for(view_class) is not None:
            self._before_authentication.add(name)

    def _check_options(self) -> None:
        """Raise PolicyError for an option about requests that is not valid."""
        options = self.options
        for option in ("block", "charge_on_error"):
            if type(options[option]) is not bool:
                raise PolicyError(f"{option} {options[option]!r} is not True or False.")
        check_function("charge_when", options["charge_when"])
        check_function("response", options["response"], may_be_async=True)
        check_cost(options["cost"])
        for policy in self.policies.sample_policies:
            if isinstance(policy, Policy):
                problem = cost_problem(options["cost"], policy)
                if problem is not None:
                    raise PolicyError(f"{policy.rate}: {problem}")


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
