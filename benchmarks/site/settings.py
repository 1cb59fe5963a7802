"""Settings of the site: as little around the views as can be."""

import os
from hashlib import sha256

from benchmarks.settings import *  # noqa: F403

ROOT_URLCONF = "benchmarks.site.urls"
MIDDLEWARE: list[str] = []
LOCAL_REFUSALS = "BENCHMARKS_LOCAL_REFUSALS"  # of the environment: 1, 0, or nothing where there is no such setting yet
TOKEN = "rlaas_benchmarks"  # of the HTTP service
RATE_LIMITER = {
    **({"LOCAL_REFUSALS": os.environ[LOCAL_REFUSALS] == "1"} if os.environ.get(LOCAL_REFUSALS) else {}),
    "POLICIES": {"service": {"rate": "10000/d"}, "site": {"rate": "1000000/d", "key": "global"}},
    "MIDDLEWARE": [{"path": "/", "policies": ["site"]}],  # for the entry with a rule; no other has the middleware
    "SERVICE": {
        "TOKENS": {"bench": {"digests": [sha256(TOKEN.encode()).hexdigest()], "verbs": ["check", "usage"]}},
    },
}
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "UNAUTHENTICATED_USER": None,
    "DEFAULT_THROTTLE_RATES": {"allowed": "1000/day", "refused": "1/day"},
}
