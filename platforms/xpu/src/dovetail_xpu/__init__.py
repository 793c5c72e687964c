"""The XPU platform and worker of Dovetail."""
