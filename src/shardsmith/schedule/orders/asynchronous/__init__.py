"""Schedules without a flush: stages update their weights while microbatches are in flight. Simulated, never trained."""
