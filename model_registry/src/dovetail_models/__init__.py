"""Model architectures of Dovetail, one file for each family.

Importing this package does not import torch. The entry points of the group `dovetail.model` name
the classes, and only the selected class is imported.
"""
