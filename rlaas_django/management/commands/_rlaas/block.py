"""manage.py rlaas block: refuse all requests of an identity or a network."""

from __future__ import annotations

from argparse import Namespace

from ....limiter import overrides
from . import overriding
from .output import Output

HELP = "Block an identity or a network: all of its requests are refused, on all servers, until the block ends."
EXAMPLE = 'manage.py rlaas block 203.0.113.0/24 --for 7d --reason "scraping"'
add_arguments = overriding.add_arguments


def run(options: Namespace, output: Output) -> None:
    """Set the block."""
    overriding.set_override(options, output, overrides.BLOCK)
