"""What exists: models, clusters, workloads, jobs."""
