"""Everything distributed: mesh, pipeline, parallelism, optimizer, checkpoints."""
