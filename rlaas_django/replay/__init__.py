"""Replay access logs through the limiter: what would a limit have refused?

`sources` reads the logs, `running` has the limiter decide their requests at the times
they were made, `demand` counts what clients ask for, `report` sums up.
"""
