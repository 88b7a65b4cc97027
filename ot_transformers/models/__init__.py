"""Floor 5: attention layers and token clouds of real trained transformers."""
