"""The planner: searches all layouts of a model on a cluster, and explains what it found."""
