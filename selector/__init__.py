"""Which drafter serves which request."""
