"""Several ranks that share a model: which shard each rank has, and how they exchange tensors.

torch's distributed package is imported only if there is more than one rank.
"""
