"""Replay access logs through the limiter: what would a limit have refused?

`log` reads them, `running` has the limiter decide their requests at the times they
were made, `report` sums up.
"""
