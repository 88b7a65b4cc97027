"""Floor 4: clustering, rank, gaussianity, stability, mean-field rate and phase diagrams."""
