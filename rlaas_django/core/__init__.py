"""Pure Python: neither Django nor Redis is imported here."""
