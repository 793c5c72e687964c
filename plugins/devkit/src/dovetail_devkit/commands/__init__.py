"""The commands of this package: `dovetail plugins doctor` and `dovetail plugins new`."""
