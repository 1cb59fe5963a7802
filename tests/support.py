"""Small helpers of tests on Cluster and Sentinel."""

from __future__ import annotations

from django.core import checks

IDENTITIES = [f"user-{n}" for n in range(2_000)]
ACL_RULES = ("on", ">s3cret", "~rlaas:*", "+@all")  # for ACL SETUSER: a user with a password and our keys alone


def report(capsys, text: str) -> None:
    """Print a measurement, also when the test passes."""
    with capsys.disabled():
        print(f"\n  {text}")


def check_ids() -> list[str]:
    """Return the ids of our messages of the system checks."""
    return [each.id for each in checks.run_checks() if each.id.startswith("rlaas_django.")]
