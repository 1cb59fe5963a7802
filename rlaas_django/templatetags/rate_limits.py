"""{% load rate_limits %}: what a client has left of its limits."""

from __future__ import annotations

from django import template
from django.core.exceptions import ImproperlyConfigured
from django.template.context import Context

from .. import limiter
from ..core.decision import Decision
from ..http.gate import peek

register = template.Library()


@register.simple_tag(takes_context=True)
def rate_limit_status(context: Context, *policies: str) -> Decision:
    """Return the decision of policies, without a charge.

    `{% rate_limit_status "search" as quota %}`; without names the default policy.
    """
    if "request" not in context:
        raise ImproperlyConfigured(
            "{% rate_limit_status %} needs the request: add "
            "django.template.context_processors.request to TEMPLATES."
        )
    return peek(context["request"], *policies) or limiter.unlimited()
