"""The former location of the conformance kit. Importing it raises an error with the new name."""

raise ImportError(
    "dovetail.testing has moved to dovetail_devkit. Run: pip install dovetail-devkit\n"
    "Write, for example, `from dovetail_devkit import load_suite`; "
    "dovetail.testing.fake_worker is now dovetail_devkit.fakes.worker."
)
