"""The sections of the check, one module each: `run(task, report)` runs a section and reports it.

A section raises `NeedsDeviceError` if it does not apply to a device; all other errors are failures.
"""
