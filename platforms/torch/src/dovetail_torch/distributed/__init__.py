"""Several ranks that share a model: which part each one has, and how they add up.

Nothing here imports torch's own distributed package before there is a second rank.
"""
