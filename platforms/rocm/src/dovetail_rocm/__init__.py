"""The ROCm platform and worker of Dovetail."""
