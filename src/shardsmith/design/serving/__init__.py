"""Inference layouts: weights and key/value cache on a device, time to the first token and between tokens."""
