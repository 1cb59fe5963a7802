"""The old name of tests/traffic.py, for test_cluster.py and test_sentinel.py until they use the new one."""

from tests.traffic import ROOMY, SLACK, TIMEOUT, Failover, Load, counted

__all__ = ["ROOMY", "SLACK", "TIMEOUT", "Failover", "Load", "counted"]
