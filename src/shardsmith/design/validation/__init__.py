"""Predictions against measured runs: rows, left-out fits, choice, reports."""
