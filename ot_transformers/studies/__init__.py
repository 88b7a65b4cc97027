"""Floor 6: the runnable jobs, config in and result folder out."""
