"""A worker process: reads jobs as JSON lines, runs them, and writes one reply line per job.

`python -m dovetail_lab.experiments.worker`. Standard output is used for the protocol: the output
of a policy goes to standard error instead.
"""

from __future__ import annotations

import json
import os
import sys

from dovetail_lab.experiments.engines import run_workload
from dovetail_lab.experiments.job import Job, do_job


def main() -> None:
    """Run jobs until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        record = do_job(Job.from_plain(json.loads(line)), run_workload)
        sys.stdout.flush()
        replies.write(json.dumps({"run_id": record.run_id}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
