"""The sections of the check, one module each: `run(task, report)` runs it and writes the report.

A section raises `NeedsDeviceError` if it does not apply to a device; all other errors are failures.
"""
