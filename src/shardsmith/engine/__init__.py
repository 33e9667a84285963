"""The doing wing: everything that runs a plan, on torch."""
