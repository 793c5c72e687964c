"""Write a tiny Llama checkpoint with random weights.

It loads like any checkpoint (config.json, model.safetensors, tokenizer.json with a chat template)
and generates words without meaning. Without arguments it writes to a temporary directory.

    python examples/make_checkpoint.py [DIRECTORY] [--seed N]
"""

import argparse
import tempfile
from pathlib import Path

from dovetail.cli.random_checkpoint import write_random_checkpoint

parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
parser.add_argument("directory", type=Path, nargs="?", help="default: a new temporary directory")
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()
if arguments.directory and arguments.directory.exists():
    parser.error(f"{arguments.directory} already exists; specify another directory")
directory = arguments.directory or Path(tempfile.mkdtemp(prefix="dovetail-checkpoint-"))
print(write_random_checkpoint(directory, seed=arguments.seed))
