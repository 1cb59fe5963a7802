"""manage.py rlaas exempt: allow all requests of an identity or a network."""

from __future__ import annotations

from argparse import Namespace

from ....limiter import overrides
from . import overriding
from .output import Output

HELP = "Exempt an identity or a network (allowlist): nothing is refused and nothing charged until the exemption ends."
EXAMPLE = 'manage.py rlaas exempt 203.0.113.9 --for 30d --reason "monitoring"'
add_arguments = overriding.add_arguments


def run(options: Namespace, output: Output) -> None:
    """Set the exemption."""
    overriding.set_override(options, output, overrides.EXEMPT)
