"""manage.py rlaas replay: what a limit would have refused, by an access log."""

from __future__ import annotations

import json
import re
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.core.management.base import CommandError
from django.template.defaultfilters import pluralize

from .. import conf
from ..core.algorithms import ALGORITHMS, TOKEN_BUCKET
from ..core.keys import key_kind
from ..core.policy import Policy, PolicyError, Rate, nearest
from ..core.rules import Rule, parse_methods
from ..operators.formatting import duration
from ..replay.log import FIELDS, STDIN, LineParser, Log, Request
from ..replay.report import QUANTILES, report
from ..replay.running import Replay
from .base import (
    HEADING,
    Argument,
    Output,
    Styled,
    argument,
    percent,
    subcommand,
)

FORM = 'write "100/m by ip" or "20/10s by user, token bucket, burst 40"'
PROGRESS_INTERVAL = 2.0  # seconds

_RATE_AND_KEY = re.compile(r"([\d_]+(?:/| per )\S.*?)(?:\s+(?:by|per)\s+(.+))?")
_BURST = re.compile(r"burst\s*=?\s*(\d+)")


def parse_policy(text: str, known: Mapping[str, Policy]) -> Policy:
    """Return the policy that a text describes, or a known one of this name."""
    first, *parts = [part.strip() for part in text.split(",")]
    if not parts and first in known:
        return known[first]

    match = _RATE_AND_KEY.fullmatch(first)
    if match is None:
        hint = nearest(first, known)
        raise PolicyError(
            f"RATE_LIMITER['POLICIES'] has no policy {text!r}{hint} Or {FORM}."
        )

    options: dict[str, Any] = {}
    if match[2]:
        options["key"] = match[2]

    for part in parts:
        if burst := _BURST.fullmatch(part):
            options["burst"] = int(burst[1])
            options.setdefault("algo", TOKEN_BUCKET)
        else:
            options["algo"] = parse_algorithm(part)

    try:
        return Policy("replay", match[1], **options)
    except PolicyError as error:
        raise PolicyError(f"{text!r}: {error}") from None


def limit_in_words(policy: Policy | None) -> str:
    """Return a limit as `parse_policy` takes it: `20/10s by user, token bucket`."""
    if policy is None:
        return ""

    rate = "a function"
    if isinstance(policy.rate, Rate):
        rate = str(policy.rate)

    algorithm = policy.algo or conf.config().algo
    words = algorithm.removesuffix("-algo").replace("-", " ")
    limit = f"{rate} by {name_of(policy.key)}, {words}"
    if policy.burst:
        limit += f", burst {policy.burst}"
    return limit


def name_of(function: Any) -> str:
    """Return the name of a function, or text as it is."""
    return getattr(function, "__qualname__", str(function))


def parse_algorithm(text: str) -> str:
    """Return the algorithm that `token bucket` or `token-bucket-algo` names."""
    words = re.split(r"[\s_-]+", text.lower().removesuffix("-algo"))
    name = "-".join([*words, "algo"])
    if name not in ALGORITHMS:
        raise PolicyError(
            f"{text!r} is not an algorithm{nearest(name, ALGORITHMS)} "
            f"Write one of {', '.join(ALGORITHMS)}."
        )
    return name


def parse_status(text: str) -> str:
    """Return what the status codes that `401` or `4xx` stands for begin with."""
    if not re.fullmatch(r"[1-5](xx|\d\d)", text):
        raise ArgumentTypeError(f"{text!r} is not a status; write 401 or 4xx")
    return text.rstrip("x")


def parse_share(text: str) -> float:
    """Return the share that `0.1%` or `0.001` stands for."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    if match is not None:
        share = float(match[1])
        if match[2]:
            share /= 100
        if share <= 1:
            return share
    raise ArgumentTypeError(f"{text!r} is not a share; write 0.1% or 0.001")


def parse_field(text: str) -> tuple[str, str]:
    """Return the name and the field of `ip=client.addr`."""
    name, _, field = text.partition("=")
    if not name or not field:
        raise ArgumentTypeError(f"{text!r} does not name a field; write ip=client.addr")
    return name, field


def several(name: str, **options: Any) -> Argument:
    """Return an option that may be given several times."""
    return argument(name, action="append", default=[], **options)


@subcommand(
    argument(
        "logs",
        nargs="*",
        default=[STDIN],
        metavar="LOG",
        help="Files, also .gz; - is standard input.",
    ),
    several("--policy", required=True, metavar="TEXT", help=f"A limit to try: {FORM}."),
    several(
        "--algo",
        help="An algorithm to try, for policies that name none (default: all).",
    ),
    argument(
        "--share",
        type=parse_share,
        default=0.001,
        help="The share of requests that may be refused (default: 0.1%%).",
    ),
    several("--path", help="Only requests below a path, such as /api/."),
    several("--method", help="Only requests of a method."),
    several("--status", type=parse_status, help="Only one: 401, 4xx."),
    several(
        "--field",
        type=parse_field,
        metavar="NAME=FIELD",
        help=f"Say in which field JSON lines have {', '.join(FIELDS)}, "
        "or a key such as header:X-Api-Key.",
    ),
    argument(
        "--cache",
        help="The cache whose Redis runs the scripts (default: RATE_LIMITER['CACHE']).",
    ),
    example='manage.py rlaas replay access.log --policy "100/m by ip" '
    '--policy "20/10s by user, token bucket, burst 40"',
)
def replay(options: Namespace, output: Output) -> int:
    """Replay access logs through the scripts, and find the limit to set.

    The exit code is 1 when there is no request in them.
    """
    started = time.monotonic()
    fields = dict(options.field)
    known = conf.config().policies
    policies = {text: parse_policy(text, known) for text in options.policy}
    for text, policy in policies.items():
        if key_kind(policy.key) == "key" and policy.key not in fields:
            raise PolicyError(
                f"{text!r}: its key is a function of the request, "
                "which a log does not tell."
            )

    algorithms = [parse_algorithm(text) for text in options.algo]
    cache = options.cache or conf.config().cache
    running = Replay(policies, algorithms or list(ALGORITHMS), cache)

    try:
        log = Log(options.logs, LineParser(fields), _make_filter(options))
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    with log:
        running.run(_batches(log, output, options.verbosity))

    if running.too_slow:
        output.stderr.write(
            "The log has more requests in the shortest window than the replay "
            "makes in that time: counters may have expired too early. "
            "Try fewer policies or algorithms at once."
        )

    if running.went_back:
        output.stderr.write(
            "The log goes back in time by more than a window: clients were counted "
            "anew from there. Sort the log by time for exact figures."
        )

    summary = report(running, log, options.share)
    if output.as_json:
        output.json(summary)
    else:
        show(summary, output, time.monotonic() - started)
    return 0 if summary["replayed"] else 1


def _make_filter(options: Namespace) -> Callable[[Request], bool]:
    """Return the function that says whether a request is replayed."""
    statuses = tuple(options.status)
    methods = None
    if options.method:
        methods = parse_methods(options.method)

    # Paths match as those of middleware rules do; all paths are below /.
    paths = options.path or ["/"]
    rules = [Rule(path, None, methods, ()) for path in paths]

    def is_wanted(request: Request) -> bool:
        if statuses and not str(request.status).startswith(statuses):
            return False

        path = request.path.partition("?")[0]
        return any(rule.matches(path, request.method) for rule in rules)

    return is_wanted


def _batches(log: Log, output: Output, verbosity: int) -> Iterator[list[Request]]:
    """Yield the batches of a log, and print now and then how far it is read."""
    started = time.monotonic()
    shown = started

    for batch in log.batches():
        yield batch

        now = time.monotonic()
        if verbosity == 0 or now - shown < PROGRESS_INTERVAL:
            continue

        shown = now
        text = f"{log.lines:,} lines, {log.lines / (now - started):,.0f}/s"
        if log.share_read is not None:
            text += f", {log.share_read:.0%}"
        output.stderr.write(text, style_func=str)  # not in red, as errors are


def show(summary: dict[str, Any], output: Output, seconds: float) -> None:
    """Print a report."""
    output.line(
        f"Replayed {summary['replayed']:,} requests, "
        f"{summary['from']} to {summary['until']}, in {seconds:.1f} s."
    )
    if summary["filtered"]:
        output.line(
            f"{summary['filtered']:,} others do not match --path, --method or --status."
        )
    unreadable = summary["unreadable"]
    if unreadable:
        text = f"{unreadable:,} line{pluralize(unreadable)} could not be read:"
        output.line(Styled(text, "WARNING"))
    for sample in summary["unreadable_samples"]:
        output.line(f"  {sample['file']}:{sample['line']}: {sample['text']}")

    for policy in summary["policies"]:
        _show_policy(policy, output, summary["wanted_share"])


def _show_policy(policy: dict[str, Any], output: Output, share: float) -> None:
    """Print what a policy would have refused, and the limit to set."""
    about = "about " if policy["identities_are_approximate"] else ""
    output.line()
    output.line(
        Styled(policy["policy"], HEADING),
        f": {policy['requests']:,} requests of {about}"
        f"{policy['identities']:,} identities",
    )
    if policy["without_identity"]:
        text = f"{policy['without_identity']:,} requests have no identity to count by."
        output.line(Styled(text, "WARNING"))

    _show_refusals(policy, output, share)
    _show_peaks(policy, output)
    _show_worst(policy, output)

    name = "per-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", policy["key"])
    output.line()
    output.line(
        f"To refuse at most {percent(share)} of the requests, "
        "as an entry of RATE_LIMITER['POLICIES']:"
    )
    output.line(f"  {json.dumps(name)}: {json.dumps(policy['suggestion'])},")


def _show_refusals(policy: dict[str, Any], output: Output, share: float) -> None:
    """Print what each algorithm refused."""
    columns = (
        "algorithm",
        ">refused",
        ">share",
        ">identities",
        ">longest wait",
        f">most in {duration(policy['window'])}",
        f">limit for {percent(share)}",
    )

    rows = []
    for run in policy["algorithms"]:
        style = "WARNING" if run["refused_share"] > share else "SUCCESS"
        row = (
            run["algorithm"],
            f"{run['refused']:,}",
            Styled(percent(run["refused_share"]), style),
            f"{run['identities_refused']:,}",
            duration(run["longest_wait"]),
            f"{run['most_admitted_in_a_window']:,}",
            f"{run['limit_for_share']:,}",
        )
        rows.append(row)

    output.line()
    output.table(columns, rows)


def _show_peaks(policy: dict[str, Any], output: Output) -> None:
    """Print the demand of identities, as each algorithm counts it."""
    heading = f"requests of an identity in {duration(policy['window'])}"
    columns = [heading, *(f">{name}" for name in QUANTILES)]

    rows = []
    for run in policy["algorithms"]:
        peaks = [f"{run['peak_usage'][name]:,}" for name in QUANTILES]
        rows.append((run["algorithm"], *peaks))

    output.line()
    output.table(columns, rows)


def _show_worst(policy: dict[str, Any], output: Output) -> None:
    """Print who was refused most, by the algorithm that refused most."""
    run = max(policy["algorithms"], key=lambda run: run["refused"])
    if not run["worst"]:
        return

    columns = (f"worst under {run['algorithm']}", ">refused")
    rows = [(entry["identity"], f"{entry['refused']:,}") for entry in run["worst"]]

    output.line()
    output.table(columns, rows)
