"""Floor 2: the energies, one file a kind."""
