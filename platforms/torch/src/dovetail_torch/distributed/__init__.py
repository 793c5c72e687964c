"""Several ranks that share a model: the shard of each rank, and collective operations.

torch's distributed package is imported only if there is more than one rank.
"""
