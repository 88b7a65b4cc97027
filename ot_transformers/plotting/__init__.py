"""Floor 6: figures; every function takes `ax=` and returns its artists."""
