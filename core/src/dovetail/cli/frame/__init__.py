"""What all commands share: help pages, the version, and configuration files."""
