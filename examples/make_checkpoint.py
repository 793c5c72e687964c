"""Make a tiny Llama with random weights to play with: python examples/make_checkpoint.py DIR.

It loads like any checkpoint (config.json, model.safetensors, tokenizer.json with a chat template)
and says words without sense. `--seed N` gives another one.
"""

import argparse
from pathlib import Path

from dovetail.cli.random_checkpoint import write_random_checkpoint

parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
parser.add_argument("directory", type=Path)
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()
print(write_random_checkpoint(arguments.directory, seed=arguments.seed))
