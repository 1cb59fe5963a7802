"""Everything that talks to Redis.

Only this package imports redis-py.
"""

from .client import (
    connection_options,
    counts_in_process,
    redis_client,
    registered_scripts,
    topology,
)
from .commands import Call, script_call
from .errors import UnavailableError, not_on_redis
from .execution import (
    aexecute,
    aexecute_each,
    execute,
    execute_each,
    run_commands,
    servers,
)
from .inspection import (
    encryption,
    eviction_policy,
    scan,
    scan_page,
    server_info,
)
from .server import Server
from .topology import Topology

__all__ = [
    "Call",
    "Server",
    "Topology",
    "UnavailableError",
    "aexecute",
    "aexecute_each",
    "connection_options",
    "counts_in_process",
    "encryption",
    "eviction_policy",
    "execute",
    "execute_each",
    "not_on_redis",
    "redis_client",
    "registered_scripts",
    "run_commands",
    "scan",
    "scan_page",
    "script_call",
    "server_info",
    "servers",
    "topology",
]
