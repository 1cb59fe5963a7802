"""Names of views: what the counters of their own rates are called."""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any, NamedTuple

from ..core.policy import MAX_NAME_LENGTH


def policy_name(view_name: str, ending: str) -> str:
    """Return the name of a view's own policy, as a policy's name may be written."""
    clean = re.sub(r"[^A-Za-z0-9_.-]+", "-", view_name)
    excess = len(clean) + len(ending) - MAX_NAME_LENGTH
    if excess > 0:
        digest = hashlib.blake2b(view_name.encode(), digest_size=4).hexdigest()
        clean = f"{digest}-{clean[excess + len(digest) + 1 :]}"
    return clean + ending


class ViewParts(NamedTuple):
    """What a view is made of, whichever way it is decorated."""

    view_class: type | None
    method: str  # of the class, if it is only that one
    function: Any  # where there is no class


def view_name(view: Any) -> str:
    """Return the dotted name of a view, whichever way it is decorated."""
    parts = _parts_of(view)
    if parts.view_class is None:
        return f"{parts.function.__module__}.{_qualname(parts.function)}"

    name = _class_name(parts.view_class)
    if parts.method:
        name += f".{parts.method}"
    return name


def view_label(view: Any) -> str:
    """Return what clients see of a view's name, never a Python path.

    >>> view_label(shop.views.Cart.post)
    'Cart-post'
    """
    parts = _parts_of(view)
    if parts.view_class is None:
        qualname = _qualname(parts.function)
        return qualname.rpartition("<locals>.")[2].replace(".", "-")

    label = parts.view_class.__name__
    if parts.method:
        label += f"-{parts.method}"
    return label


def owner_of(view: Any) -> tuple[Any, str]:
    """Return the object whose method a view is, and the method's name.

    `method_decorator` decorates a partial of the bound method, below others.
    """
    while view is not None:
        method: Any = getattr(view, "func", None)
        if getattr(method, "__self__", None) is not None:
            return method.__self__, method.__name__
        view = getattr(view, "__wrapped__", None)
    return None, ""


def view_class_of(view: Any) -> type | None:
    """Return the class whose `as_view()` made a view, if any."""
    view_class: type | None = getattr(view, "view_class", getattr(view, "cls", None))
    return view_class


def _parts_of(view: Any) -> ViewParts:
    owner, method = owner_of(view)
    if owner is not None:
        if method == "dispatch":
            method = ""
        return ViewParts(type(owner), method, None)

    function = view
    if isinstance(view, functools.partial):
        function = view.func
    return ViewParts(view_class_of(view), "", function)


def _qualname(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _class_name(view_class: type) -> str:
    # A framework may make a class of a function that is only called like it.
    name = view_class.__qualname__
    if not name.endswith(view_class.__name__):
        name = view_class.__name__
    return f"{view_class.__module__}.{name}"
