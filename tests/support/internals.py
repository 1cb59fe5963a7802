"""The names inside the package that tests use, in one place: when a module moves, this file alone changes."""

from __future__ import annotations

import math
import os
import threading
import time

from rlaas_django import backend, conf
from rlaas_django import limiter as limiter_module
from rlaas_django.backend import UnavailableError
from rlaas_django.backend import circuit_breaker as breaker_module
from rlaas_django.backend import pool as pool_module
from rlaas_django.backend.circuit_breaker import CircuitBreaker
from rlaas_django.backend.commands import Call, pack
from rlaas_django.backend.connection import ConnectionOptions
from rlaas_django.backend.errors import NextAttempt, next_attempt
from rlaas_django.backend.pool import Pool
from rlaas_django.backend.process_store import ProcessServer, ProcessStore, process_store
from rlaas_django.backend.scripts import SCRIPTS, for_algorithms
from rlaas_django.backend.server import PAGE_TIMEOUT
from rlaas_django.backend.topology import ClusterTopology, DiscoveredTopology, Refresher, SentinelTopology
from rlaas_django.checks import settings as settings_checks
from rlaas_django.checks import views as view_checks
from rlaas_django.checks.login import check_logins
from rlaas_django.checks.server import check_eviction, check_rights
from rlaas_django.checks.settings import check_deployed_store, check_proxies, check_shared_cache
from rlaas_django.conf import POLICY_OPTIONS
from rlaas_django.core.algorithms import ALGORITHMS as ALGORITHM_RECORDS
from rlaas_django.core.algorithms import (
    FIXED_WINDOW,
    SLIDING_WINDOW,
    SLIDING_WINDOW_COMPACT,
    SLIDING_WINDOW_COUNTER,
    TOKEN_BUCKET,
    Algorithm,
)
from rlaas_django.core.counters import Counter, Usage
from rlaas_django.core.decision import Decision, Outcome, passes, strictest
from rlaas_django.core.keys import EncodedIdentity, counter_key, decode, encode, parse_counter_key
from rlaas_django.core.keys import identify as identify_with
from rlaas_django.core.policy import KEY_PREFIXES, KEYS, YEAR, Policy, Rate, ScriptArguments
from rlaas_django.core.rules import OPTIONS as RULE_OPTIONS
from rlaas_django.core.text import fold
from rlaas_django.http import headers as header_module  # the one that names headers
from rlaas_django.http import rules as http_rules
from rlaas_django.http.headers import whole_seconds
from rlaas_django.http.proxies import client_address
from rlaas_django.limiter import (
    PolicySet,
    acheck_each,
    check_each,
    compile_policies,
    networks,
    overrides,
    refund_units,
    refusal_cache,
)
from rlaas_django.limiter.adjusting import refund_call
from rlaas_django.limiter.fallback import MAX_ENTRIES, local_store
from rlaas_django.limiter.plan import plan as check_plan
from rlaas_django.limiter.plan import plan_encoded
from rlaas_django.limiter.replies import read as read_reply
from rlaas_django.limiter.replies import refund_arguments
from rlaas_django.management import doctor
from rlaas_django.management.base import Output as CommandOutput
from rlaas_django.management.base import Styled
from rlaas_django.management.commands.rlaas import SUBCOMMANDS
from rlaas_django.management.commands.rlaas import Command as RlaasCommand
from rlaas_django.management.replay import parse_policy
from rlaas_django.models import Override
from rlaas_django.replay.log import LineParser, Log, parse_time
from rlaas_django.replay.log import Request as LogRequest
from rlaas_django.replay.report import report as replay_report
from rlaas_django.replay.running import Replay
from rlaas_django.runtime import background, log, observers, registry
from rlaas_django.runtime.background import run as run_background_jobs
from rlaas_django.service import auth as service_auth
from rlaas_django.service import receipts
from rlaas_django.service import urls as service_urls
from rlaas_django.service import views as service_views
from rlaas_django.service.parsing import FIELDS
from rlaas_django.stats import recorder
from rlaas_django.stats.reader import minutes as read_minutes
from rlaas_django.stats.reader import refusals as read_refusals
from rlaas_django.stats.reader import total
from rlaas_django.stats.reader import totals as statistics_totals
from rlaas_django.stats.recorder import flush as flush_statistics
from rlaas_django.stats.schema import SITE as SITE_STATISTICS

__all__ = [
    "ALGORITHMS",
    "ALGORITHM_RECORDS",
    "DEFAULTS",
    "FIELDS",
    "FIXED_WINDOW",
    "KEYS",
    "KEY_PREFIXES",
    "MAX_ENTRIES",
    "PAGE_TIMEOUT",
    "POLICY_OPTIONS",
    "RULE_OPTIONS",
    "SCRIPTS",
    "SITE_STATISTICS",
    "SLIDING_WINDOW",
    "SLIDING_WINDOW_COMPACT",
    "SLIDING_WINDOW_COUNTER",
    "SUBCOMMANDS",
    "TOKEN_BUCKET",
    "TOPOLOGY_THREAD",
    "YEAR",
    "Algorithm",
    "CircuitBreaker",
    "ClusterTopology",
    "CommandOutput",
    "ConnectionOptions",
    "Counter",
    "Decision",
    "DiscoveredTopology",
    "EncodedIdentity",
    "LineParser",
    "Log",
    "LogRequest",
    "NextAttempt",
    "Outcome",
    "Policy",
    "PolicySet",
    "Pool",
    "ProcessServer",
    "ProcessStore",
    "Rate",
    "Refresher",
    "Replay",
    "RlaasCommand",
    "ScriptArguments",
    "SentinelTopology",
    "Styled",
    "UnavailableError",
    "Usage",
    "acheck_each",
    "arefund_receipt",
    "backend",
    "background",
    "breaker_module",
    "cached_refusals",
    "call_now",
    "check_deployed_store",
    "check_each",
    "check_eviction",
    "check_logins",
    "check_plan",
    "check_proxies",
    "check_rights",
    "check_settings",
    "check_shared_cache",
    "circuit_breaker",
    "client_address",
    "compile_policies",
    "conf",
    "connection_pool",
    "counter_key",
    "decode",
    "doctor",
    "encode",
    "escape_for_log",
    "flush_statistics",
    "fold",
    "forget_limits",
    "forget_loaded_urls",
    "forget_notice",
    "have_no_background_thread",
    "header_module",
    "identify",
    "limiter_module",
    "limits_in_use",
    "local_store",
    "log",
    "networks",
    "next_attempt",
    "observers",
    "overrides",
    "pack_words",
    "parse_counter_key",
    "parse_policy",
    "parse_time",
    "passes",
    "paused_background",
    "plan_encoded",
    "pool_module",
    "process_store",
    "read_minutes",
    "read_refusals",
    "read_reply",
    "receipts",
    "recorder",
    "redis_client",
    "redis_key",
    "refresh_is_due",
    "refund_arguments",
    "refund_call",
    "refund_receipt",
    "refund_units",
    "replay_report",
    "reset_statistics",
    "restore_limits",
    "run_background_jobs",
    "script_for",
    "service_auth",
    "service_urls",
    "set_override",
    "single_server",
    "statistics_totals",
    "strictest",
    "total",
    "unique_id",
    "whole_seconds",
]

ALGORITHMS = tuple(ALGORITHM_RECORDS)
DEFAULTS = conf.DEFAULTS
escape_for_log = log.escaped
reset_statistics = recorder.reset
TOPOLOGY_THREAD = "rlaas_django topology"


def check_settings() -> list:
    """Return what the system checks report that do not need --deploy."""
    return [*settings_checks.check_settings(), *view_checks.check_views()]


def redis_client(alias: str):
    """Return the client of a cache, for a test to look into Redis."""
    return wrap_client(backend.redis_client(alias))


def wrap_client(client):
    """Return the client as it is; tests/support/on_cluster.py puts its own in place of this."""
    return client


def have_no_background_thread() -> None:
    """Have no thread write statistics, until the next reset: tests count the commands and connections of decisions."""
    background.state.pid, background.state.wake_at = os.getpid(), math.inf


def paused_background() -> threading.Lock:
    """Return a lock that lets no round of the background thread run while it is held."""
    return background.state.round_lock


def circuit_breaker() -> CircuitBreaker:
    """Return the breaker of the server that the limiter uses."""
    return single_server().breaker


def call_now() -> Call:
    """Return a call whose time begins now."""
    return Call(sent_at=time.monotonic())


def connection_pool() -> Pool:
    """Return the connections to the server that the limiter uses."""
    return single_server()._pool


# The limits that decorators have registered, which the system checks and the admin read.


def limits_in_use() -> tuple[set, set, dict]:
    return set(registry.sources), set(registry.refundable), dict(registry.adapter_policies)


def restore_limits(before: tuple[set, set, dict]) -> None:
    """Forget the limits that were registered since, and bring back those that were forgotten."""
    sources, refundable, adapter_policies = before
    registry.adapter_policies.clear()
    registry.adapter_policies.update(adapter_policies)
    registry.sources.intersection_update(sources)
    registry.sources.update(sources)
    registry.refundable.intersection_update(refundable)


def forget_limits() -> None:
    registry.sources.clear()
    registry.adapter_policies.clear()


def identify(identity, policy: Policy) -> str:
    """Return the encoded identity under the present settings."""
    return identify_with(identity, policy, conf.config().encoding)


def redis_key(policy: Policy, identity: str, algo: str, window: int) -> str:
    return counter_key(policy.name, algo, window, hash_tag=False).key(identity)


def script_for(*algorithms: str):
    """Return the script that decides policies of these algorithms."""
    return for_algorithms(algorithms)


def single_server():
    """Return the server of the present settings, with its circuit breaker."""
    return backend.topology().master


def cached_refusals() -> int:
    """Return how many refusals this process has cached."""
    return len(refusal_cache.cached_refusals().entries)


def set_override(identity: str, policy: str, kind: str, until, *, by, **fields) -> Override:
    """Set an override in the database and in Redis."""
    override = Override(identity=identity, policy=policy, kind=kind, until=until, **fields)
    override.activate(by)
    return override


def refund_receipt(text: str) -> bool:
    """Refund a receipt, as the sync view does."""
    return service_views._run(receipts.refund(receipts.read(text), service_views._call_sync))


async def arefund_receipt(text: str) -> bool:
    """As `refund_receipt`, as the async view does."""
    return await receipts.refund(receipts.read(text), service_views._call_async)


def unique_id() -> str:
    check = check_plan("alice", None, 1)
    check.pack()
    return check.unique


def pack_words(words) -> bytes:
    """Return a command as hiredis packs it."""
    return pack(words)


def refresh_is_due() -> bool:
    """Return whether the topology of a Cluster or of Sentinels is being refreshed, or will be."""
    return any(thread.name == TOPOLOGY_THREAD for thread in threading.enumerate())


def forget_loaded_urls() -> None:
    """Have the middleware import the URLs with its next request, as with the first one of a process."""
    http_rules._exempt_prefixes.cache_clear()


def forget_notice() -> None:
    """Have the next decision in the process log that it is one."""
    ProcessServer._next_line = 0.0
