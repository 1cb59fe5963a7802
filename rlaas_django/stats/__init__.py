"""Statistics of decisions: their numbers, recent refusals, identities near a limit."""
