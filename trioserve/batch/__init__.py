"""Batch files: a request on each line in, a result on each line out."""
