"""Floor 4: curves, convexity probes, witnesses and certificates."""
