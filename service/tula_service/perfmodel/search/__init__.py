"""Which configurations there are, which to profile next, and when to stop."""
