"""Floor 2: the attention maps, one file a kind."""
