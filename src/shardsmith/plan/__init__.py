"""The Plan, its mesh, its stages, its file."""
