"""manage.py rlaas replay: what a limit would have refused, by an access log."""

from __future__ import annotations

import json
import re
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from typing import Any

from django.core.management.base import CommandError

from .. import conf
from ..core.algorithms import ALGORITHMS, TOKEN_BUCKET
from ..core.keys import key_kind
from ..core.policy import Policy, PolicyError, nearest
from ..core.rules import Rule, parse_methods
from ..operators.formatting import duration
from ..replay.log import FIELDS, STDIN, LineParser, Log, Request
from ..replay.report import QUANTILES, report
from ..replay.running import Replay as LogReplay
from .base import (
    HEADING,
    Argument,
    Output,
    Styled,
    Subcommand,
    argument,
    percent,
    plural,
)

FORM = 'write "100/m by ip" or "20/10s by user, token bucket, burst 40"'
PROGRESS_INTERVAL = 2.0  # seconds

_RATE_AND_KEY = re.compile(r"(\d+/\S+)(?:\s+(?:by|per)\s+(.+))?")
_BURST = re.compile(r"burst\s*=?\s*(\d+)")


def _words(text: str) -> str:
    """Return the name of an algorithm as words: `token bucket`."""
    name = text.lower().removesuffix("-algo")
    return " ".join(re.split(r"[\s_-]+", name.strip()))


_ALGORITHMS = {_words(algorithm): algorithm for algorithm in ALGORITHMS}


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
        options["key"] = re.sub(r"\s+or\s+", "_or_", match[2])

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


def parse_algorithm(text: str) -> str:
    """Return the algorithm that `token bucket` or `token-bucket-algo` names."""
    words = _words(text)
    if words in _ALGORITHMS:
        return _ALGORITHMS[words]

    hint = nearest(words, [*_ALGORITHMS, "burst 40"])
    raise PolicyError(
        f"{text!r} is not an algorithm{hint} Write one of {', '.join(_ALGORITHMS)}."
    )


def parse_statuses(text: str) -> range:
    """Return the status codes that `401` or `4xx` stands for."""
    if not re.fullmatch(r"[1-5](xx|\d\d)", text):
        raise ArgumentTypeError(f"{text!r} is not a status; write 401 or 4xx")
    first = int(text.replace("x", "0"))
    last = int(text.replace("x", "9"))
    return range(first, last + 1)


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


class Replay(Subcommand):
    """Replay access logs through the scripts."""

    help = "Replay access logs through the scripts, and find the limit to set."
    example = (
        'manage.py rlaas replay access.log --policy "100/m by ip" '
        '--policy "20/10s by user, token bucket, burst 40"'
    )

    arguments = (
        argument(
            "logs",
            nargs="*",
            default=[STDIN],
            metavar="LOG",
            help="Files, also .gz; - is standard input.",
        ),
        several("--policy", metavar="TEXT", help=f"A limit to try: {FORM}."),
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
        several("--status", type=parse_statuses, help="Only one: 401, 4xx."),
        several(
            "--field",
            type=parse_field,
            metavar="NAME=FIELD",
            help=f"Say in which field JSON lines have {', '.join(FIELDS)}, "
            "or a key such as header:X-Api-Key.",
        ),
        argument(
            "--cache",
            help="The cache whose Redis runs the scripts "
            "(default: RATE_LIMITER['CACHE']).",
        ),
    )

    def run(self, options: Namespace, output: Output) -> int:
        """Replay the logs; the exit code is 1 when there is no request in them."""
        started = time.monotonic()
        fields = dict(options.field)
        policies = _policies(options.policy, fields)
        algorithms = [parse_algorithm(text) for text in options.algo]
        cache = options.cache or conf.config().cache
        replay = LogReplay(policies, algorithms or list(ALGORITHMS), cache)

        with _open_log(options, fields) as log:
            replay.run(log.batches(), _progress(log, output, options.verbosity))

        if replay.too_slow:
            output.warn(
                "The log has more requests in the shortest window than the replay "
                "makes in that time: counters may have expired too early. "
                "Try fewer policies or algorithms at once."
            )

        summary = report(replay, log, options.share)
        if output.as_json:
            output.json(summary)
        else:
            show(summary, output, time.monotonic() - started)
        return 0 if summary["replayed"] else 1


def _policies(texts: list[str], fields: dict[str, str]) -> list[tuple[str, Policy]]:
    """Return the policies to try, each with its text."""
    if not texts:
        raise CommandError(f"Name a limit to try by --policy: {FORM}.")

    policies = [(text, parse_policy(text, conf.config().policies)) for text in texts]
    for text, policy in policies:
        if key_kind(policy.key) == "key" and policy.key not in fields:
            raise PolicyError(
                f"{text!r}: its key is a function of the request, "
                "which a log does not tell."
            )
    return policies


def _open_log(options: Namespace, fields: dict[str, str]) -> Log:
    try:
        return Log(options.logs, LineParser(fields), _make_filter(options))
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error


def _make_filter(options: Namespace) -> Callable[[Request], bool]:
    """Return the function that says whether a request is replayed."""
    statuses = {status for codes in options.status for status in codes}
    methods = None
    if options.method:
        methods = parse_methods(options.method)

    # Paths match as those of middleware rules do; all paths are below /.
    paths = options.path or ["/"]
    rules = [Rule(path, None, methods, ()) for path in paths]

    def is_wanted(request: Request) -> bool:
        if statuses and request.status not in statuses:
            return False

        path = request.path.partition("?")[0]
        return any(rule.matches(path, request.method) for rule in rules)

    return is_wanted


def _progress(log: Log, output: Output, verbosity: int) -> Callable[[], None]:
    """Return a function that prints now and then how far the log is read."""
    started = time.monotonic()
    shown = started

    def progress() -> None:
        nonlocal shown
        now = time.monotonic()
        if verbosity == 0 or now - shown < PROGRESS_INTERVAL:
            return

        shown = now
        text = f"{log.lines:,} lines, {log.lines / (now - started):,.0f}/s"
        if log.share_read is not None:
            text += f", {log.share_read:.0%}"
        output.stderr.write(text, style_func=str)  # not in red, as errors are

    return progress


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
    if summary["unreadable"]:
        text = f"{plural(summary['unreadable'], 'line')} could not be read:"
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
