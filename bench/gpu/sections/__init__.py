"""The sections of the check, a module each: `run(task, report)` does one and writes what it finds.

What a section cannot do on a device it says by `NeedsDeviceError`; all other errors are findings.
"""
