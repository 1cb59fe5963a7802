"""The site whose requests are counted: one view per contender, allowed and refused, sync and async."""
