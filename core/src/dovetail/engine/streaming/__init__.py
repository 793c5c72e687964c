"""The parts of `AsyncLLM` that stream outputs in one event loop.

`request_streamer` sends requests, notifies the readers of their outputs, and aborts requests
without a reader. `output_stream` is the stream of one request. `preparation` tokenizes in threads.
`event_loop_yield` lets other tasks of the event loop run.
"""
