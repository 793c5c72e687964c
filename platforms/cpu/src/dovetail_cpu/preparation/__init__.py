"""What the worker needs, prepared by other threads while torch is imported.

No module of this package imports torch. `preparation.Preparation` selects the work.
"""
