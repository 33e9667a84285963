"""Shardsmith: plan, run and prove parallel training of large models."""
