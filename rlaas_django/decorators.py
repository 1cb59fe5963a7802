"""@rate_limit, for views of every kind."""

from __future__ import annotations

import functools
import hashlib
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator

from .conf import with_head
from .gate import Gate, Respond, aenter, enter
from .policy import (
    DEFAULT,
    LONGEST_NAME,
    NAME,
    RATE_FORMS,
    KeyFunction,
    Policy,
    PolicyError,
    Rate,
    RateFunction,
    RateLike,
)

View = Callable[..., Any]

# What the system checks look through: every decorator that is in use.
in_use: weakref.WeakSet[Limit] = weakref.WeakSet()


def rate_limit(
    *limits: str | RateLike | RateFunction | Policy | View,
    key: str | KeyFunction | None = None,
    method: str | Iterable[str] | None = None,
    cost: int | Callable[[HttpRequest], int] = 1,
    group: str | None = None,
    algo: str | None = None,
    burst: int | None = None,
    on_failure: str | None = None,
    block: bool = True,
    shadow: bool = False,
    charge_when: Callable[[HttpResponseBase], Any] | None = None,
    charge_on_error: bool = True,
    response: Respond | None = None,
) -> Any:
    """Limit a view: by the default policy, by named ones, or by rates of its own.

    >>> @rate_limit
    >>> @rate_limit("login")
    >>> @rate_limit("5/m", key="ip", method="POST")
    >>> @rate_limit("10/s", "1000/h", key="user")
    >>> @rate_limit("5/m", key="ip", charge_when=lambda response: response.status_code == 401)
    """
    given = {"key": key, "algo": algo, "burst": burst, "on_failure": on_failure, "shadow": shadow or None}
    options = {option: value for option, value in given.items() if value is not None}
    gate = Gate(
        policies=(),
        cost=cost,
        methods=None if method is None else with_head([method] if isinstance(method, str) else method),
        block=block,
        response=response,
        charge_when=charge_when,
        charge_on_error=charge_on_error,
    )
    if len(limits) == 1 and callable(limits[0]) and not options and group is None and gate == Gate(()):
        return _bare(limits[0])
    return Limit(limits, options, group, gate)


def _bare(function: View) -> View:
    """`@rate_limit` on a view and `@rate_limit(rate_for)` look alike: either is a function of a request.

    So it is taken for a view until it is put on one.
    """
    limited: View = Limit((), {}, None, Gate(()))(function)
    if isinstance(function, type) or iscoroutinefunction(function):
        return limited

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not hasattr(args[0], "META"):
            return Limit((function,), {}, None, Gate(()))(args[0])
        return limited(*args, **kwargs)

    return either


class Limit:
    """`@rate_limit(...)` with its arguments read, so that a typo fails at import."""

    def __init__(self, limits: tuple[Any, ...], options: dict[str, Any], group: str | None, gate: Gate) -> None:
        self.limits = tuple(map(_read, limits)) or (DEFAULT,)
        self.options, self.group, self.gate = options, group, gate
        if not callable(gate.cost) and (type(gate.cost) is not int or gate.cost < 0):
            raise PolicyError(
                f"The cost {gate.cost!r} is not a whole number of at least 0, nor a function of a request."
            )
        if iscoroutinefunction(gate.cost):
            raise PolicyError(f"The cost {gate.cost!r} is an async function; write a plain one.")
        self.gates: dict[str, Gate] = {}  # by the name of the view
        named = [limit for limit in self.limits if isinstance(limit, (str, Policy))]
        if (options or group) and len(named) == len(self.limits):
            words = ", ".join([*options, *(["group"] if group else [])])
            raise PolicyError(f'{words}: these describe a rate, and there is none; write rate_limit("5/m", ...).')
        self._policies(group or "view")
        in_use.add(self)

    def __call__(self, view: Any) -> Any:
        gate = self.gate_for(view)
        if isinstance(view, type):
            limited: Any = _limited_class(view, gate)
        else:
            limited = _limited_function(view, gate)
        # For the system checks, in use as long as the view is; and for the next decorator on the same view.
        limited.rate_limited_by = (*getattr(view, "rate_limited_by", ()), self)
        return limited

    def gate_for(self, view: Any) -> Gate:
        """method_decorator decorates anew for each request, so the gates are kept."""
        name = _view_name(view)
        if name in self.gates:
            return self.gates[name]
        gate = replace(self.gate, policies=self._policies_for(view, name))
        if view.__module__ != method_decorator.__module__:  # which tries a decorator out on a function of its own
            self.gates[name] = gate
        return gate

    def _policies_for(self, view: Any, name: str) -> tuple[str | Policy, ...]:
        """A second decorator with a rate on the same view has a counter of its own, unless a group says otherwise."""
        if self.group:
            return self._policies(self.group)
        below = [gate for limit in getattr(view, "rate_limited_by", ()) for gate in limit.gates.values()]
        taken = {str(policy) for gate in below for policy in gate.policies if isinstance(policy, Policy)}
        policies, number = self._policies(name), 1
        while any(
            isinstance(policy, Policy) and policy.name in taken for policy in policies if policy not in self.limits
        ):
            number += 1
            policies = self._policies(f"{name}-{number}")
        return policies

    def _policies(self, name: str) -> tuple[str | Policy, ...]:
        """The policies, the rates among them named after the view; of several, each with its window."""
        rates = [limit for limit in self.limits if not isinstance(limit, (str, Policy))]
        policies: list[str | Policy] = []
        for limit in self.limits:
            if isinstance(limit, (str, Policy)):
                policies.append(limit)
                continue
            ending = "" if len(rates) == 1 else f"-{_ending(limit, rates)}"
            policies.append(Policy(_policy_name(name, ending), limit, **self.options))
        if len({str(policy) for policy in policies}) < len(policies):
            listed = ", ".join(map(str, self.limits))
            raise PolicyError(f"{listed}: two of these are the same policy, or two rates over the same window.")
        return tuple(policies)


def _read(limit: Any) -> Any:
    """A name, a policy, a rate, or a function that gives one."""
    if isinstance(limit, Policy) or callable(limit):
        return limit
    if isinstance(limit, str) and "/" not in limit:
        if NAME.fullmatch(limit):
            return limit
        raise PolicyError(f"{limit!r} is neither a rate nor the name of a policy; {RATE_FORMS}.")
    return Rate.parse(limit)


def _ending(limit: Rate | RateFunction, rates: list[Any]) -> str:
    return f"{limit.window}s" if isinstance(limit, Rate) else str(rates.index(limit) + 1)


def _policy_name(name: str, ending: str) -> str:
    """A view's name as a policy's: its characters, and its length."""
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    if len(clean) + len(ending) > LONGEST_NAME:
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        clean = f"{digest}-{clean[len(ending) + len(digest) + 1 - LONGEST_NAME :]}"
    return clean + ending


def _view_name(view: Any) -> str:
    owner, method = _owner(view)
    if owner is not None:
        return _class_name(type(owner)) + ("" if method == "dispatch" else f".{method}")
    if (view_class := getattr(view, "view_class", getattr(view, "cls", None))) is not None:  # what as_view() made
        return _class_name(view_class)
    named = view.func if isinstance(view, functools.partial) else view
    return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def _class_name(view: type) -> str:
    # Django REST framework's @api_view makes a class that is only called like the function.
    name = view.__qualname__ if view.__qualname__.endswith(view.__name__) else view.__name__
    return f"{view.__module__}.{name}"


def _owner(view: Any) -> tuple[Any, str]:
    """The object whose method this is, below other decorators, as method_decorator binds it; and the method's name."""
    while view is not None:
        bound: Any = getattr(view, "func", None)
        if getattr(bound, "__self__", None) is not None:
            return bound.__self__, bound.__name__
        view = getattr(view, "__wrapped__", None)
    return None, ""


def _is_async_dispatch(view: Any) -> bool:
    """A class-based view's dispatch is no coroutine function even when its handlers are."""
    return bool(getattr(_owner(view)[0], "view_is_async", False))


def _limited_function(view: View, gate: Gate) -> View:
    if iscoroutinefunction(view):

        @functools.wraps(view)
        async def limited(*args: Any, **kwargs: Any) -> Any:
            return await aenter(gate, _request(args, kwargs), view, *args, **kwargs)
    else:
        run: Any = aenter if _is_async_dispatch(view) else enter

        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:
            return run(gate, _request(args, kwargs), view, *args, **kwargs)

    return limited


def _limited_class(view: type, gate: Gate) -> type:
    dispatch = getattr(view, "dispatch", None)
    if dispatch is None:
        raise TypeError(f"@rate_limit is for views, and {view.__qualname__} is none: it has no dispatch method.")

    @functools.wraps(dispatch)
    def limited(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        run: Any = aenter if getattr(self, "view_is_async", False) else enter
        return run(gate, request, dispatch, self, request, *args, **kwargs)

    view.dispatch = limited  # type: ignore[attr-defined]
    return view


def _request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> HttpRequest:
    """The request among a view's arguments, or a method's."""
    for each in args[:2]:
        if hasattr(each, "META"):
            return each  # type: ignore[no-any-return]
    if hasattr(request := kwargs.get("request"), "META"):
        return request  # type: ignore[return-value]
    raise TypeError("@rate_limit is for views: there is no request among the arguments.")
