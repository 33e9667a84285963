"""Step time and memory of workloads on layouts, by closed formulas over arrays."""
