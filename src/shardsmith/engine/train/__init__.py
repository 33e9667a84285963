"""The training step and everything around it: launch, loop, optimiser, metrics."""
