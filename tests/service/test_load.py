"""Many callers of the HTTP service at once, on real servers: exactly the limit is admitted, and counted."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rlaas_django.service.client import Client

from tests.support.observation import assert_soon
from tests.support.web_servers import TOKEN, serving

LIMIT, CLIENTS = 100, 16


def decisions(url: str) -> dict[str, float]:
    """Return the metrics of a policy: decisions by result."""
    text = httpx.get(f"{url}metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30).text
    return {
        sample.labels["result"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "rlaas_decisions_total" and sample.labels["policy"] == "many"
    }


@pytest.mark.parametrize("name", ["gunicorn", pytest.param("uvicorn", marks=pytest.mark.slow)])
def test_many_callers_are_admitted_exactly_the_limit(tmp_path, name, scale):
    """With 4 workers of gunicorn; 10,000 checks by 16 clients in the long tier."""
    each = scale(10_000, least=640) // CLIENTS
    with serving(name, tmp_path / "log", workers=4) as port:
        url = f"http://127.0.0.1:{port}/rlaas/"

        def check_all(number: int) -> Counter[tuple[bool, bool]]:
            limits = Client(url, TOKEN, timeout=60, max_refusals=0)  # each check is counted
            if number % 2:
                answers = [limits.check("alice", policy="many") for _ in range(each)]
            else:  # in batches
                checks = [{"userId": "alice", "policy": "many"}] * each
                answers = [answer for at in range(0, each, 20) for answer in limits.check_each(checks[at : at + 20])]
            limits.close()
            return Counter((answer.allowed, answer.degraded) for answer in answers)

        with ThreadPoolExecutor(CLIENTS) as pool:
            seen = sum(pool.map(check_all, range(CLIENTS)), Counter())
        assert seen == {(True, False): LIMIT, (False, False): CLIENTS * each - LIMIT}
        assert_soon(lambda: decisions(url) == {"allowed": LIMIT, "refused": CLIENTS * each - LIMIT})
