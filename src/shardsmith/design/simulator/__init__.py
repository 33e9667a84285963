"""Event simulation of one training step: every rank, every lane, from given lengths or by the cost model."""
