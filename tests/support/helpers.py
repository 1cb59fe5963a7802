"""Small helpers of tests on Cluster and Sentinel."""

from __future__ import annotations

import re
from pathlib import Path

from django.core import checks
from rlaas_django import backend

from tests.support.deployments import wait_until
from tests.support.traffic import TIMEOUT

IDENTITIES = [f"user-{n}" for n in range(2_000)]
SECURITY = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def _documented_rules() -> list[str]:
    """Return the arguments of ACL SETUSER that the documentation gives, for a cluster too; the password is s3cret."""
    single = re.search(r"^ACL SETUSER limiter (.+)$", SECURITY, re.MULTILINE)
    cluster = re.search(r"On a Cluster add `(.+?)`", SECURITY)
    return f"{single[1].replace('<password>', 's3cret')} {cluster[1]}".split()


ACL_RULES = _documented_rules()


# Seconds. For a test that needs a timeout, and whose other calls must not run into it because the machine is busy.
LENIENT = 4 * TIMEOUT


def wait_for_servers() -> None:
    """Wait until the topology is known: the first request would wait for it, but no longer than its timeout."""

    def known() -> bool:
        try:
            return bool(backend.servers())
        except backend.UnavailableError:
            return False

    wait_until(known, "the servers are known")


def report(capsys, text: str) -> None:
    """Print a measurement, also when the test passes."""
    with capsys.disabled():
        print(f"\n  {text}")


def check_ids() -> list[str]:
    """Return the ids of our messages of the system checks."""
    return [each.id for each in checks.run_checks() if each.id.startswith("rlaas_django.")]
