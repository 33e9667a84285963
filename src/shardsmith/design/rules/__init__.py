"""Pitfalls that are legal but cost: what each costs here, and the fix."""
