"""Pure Python.

Neither Django nor Redis is imported here.
"""
