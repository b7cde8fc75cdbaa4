"""Guards: what is noticed about bad steps, bad data and ranks that stand still, and what is done about it."""
