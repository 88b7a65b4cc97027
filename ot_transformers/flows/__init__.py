"""Floor 3: the Transformer PDE on particles and Gaussians, gradient flows and JKO steps."""
