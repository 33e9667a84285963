"""Single-device models with named seams that the axes fill."""
