"""What `AsyncLLM` streams with, for one event loop: the desk, a reader's stream, and portions.

The desk takes requests in, brings outputs to their readers and ends what nobody reads; a stream is
where one reader waits; portions are outputs cut into short pieces of work.
"""
