"""Old names of what is in conftest.py, faults.py and support.py, for test_cluster.py and test_sentinel.py."""

from tests.conftest import certificate, connects, failures, node
from tests.conftest import limiter as ask
from tests.faults import TLSProxy
from tests.support import ACL_RULES as LIMITER
from tests.support import IDENTITIES as NAMES
from tests.support import check_ids as problems
from tests.support import report

__all__ = ["LIMITER", "NAMES", "TLSProxy", "ask", "certificate", "connects", "failures", "node", "problems", "report"]
