"""Floor 2: the metrics on measures, one file a kind."""
