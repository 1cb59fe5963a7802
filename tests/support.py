"""Small helpers of tests on Cluster and Sentinel."""

from __future__ import annotations

from django.core import checks

from rlaas_django import backend
from tests.deployments import wait_until
from tests.traffic import TIMEOUT

IDENTITIES = [f"user-{n}" for n in range(2_000)]
ACL_RULES = ("on", ">s3cret", "~rlaas:*", "+@all")  # for ACL SETUSER: a user with a password and our keys alone


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
