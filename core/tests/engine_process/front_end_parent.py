"""A second front end of an engine, in a separate process. Arguments: ADDRESS NAME.

The script adds three long requests, prints a line when all are running, and waits to be killed.
"""

import sys

from engine_traffic import Answers, request

from dovetail.engine.process.factory import attach_client

if __name__ == "__main__":
    client = attach_client(sys.argv[1], "sync")
    for number in range(3):
        client.add_request(request(f"{sys.argv[2]}{number}", [9, 9, number], max_tokens=400))
    answers = Answers()
    while len(answers.tokens) < 3:
        if (outputs := client.get_outputs(5)) is not None:
            answers.take(outputs)
    print("running", flush=True)
    sys.stdin.read()
