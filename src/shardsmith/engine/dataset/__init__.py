"""Token files: making them, reading them, and the order in which samples are seen."""
