"""An engine that only sleeps, for the tests of `bench/cpu_vs.py`. `options` set its behavior.

It runs as a child process: `python -m fake_engine`, with this directory on the path.
"""

import os
import time
from pathlib import Path

from peers.serving import serve_engine


class FakeEngine:
    def load(self, model, weights, threads, options):
        print("a library that prints to stdout")
        os.write(1, b"and one that does so from C\n")
        self._options = options
        if "pid_folder" in options:
            (Path(options["pid_folder"]) / str(os.getpid())).touch()
        if options.get("fault") == "load":
            raise ValueError("no such model")

    def prepare(self, prompts, output_lens):
        fault = self._options.get("fault") if max(output_lens) > 1 else None
        if fault == "hang":
            time.sleep(60)
        if fault == "die":
            os.write(2, b"the last words")
            os._exit(3)

    def generate(self, prompts, output_lens):
        time.sleep(self._options["token_s"] * max(output_lens))
        short = self._options.get("fault") == "short" and max(output_lens) > 1
        return [[7] * (length - short) for length in output_lens]

    def versions(self):
        return {"fake": "1"}


if __name__ == "__main__":
    serve_engine(FakeEngine())
