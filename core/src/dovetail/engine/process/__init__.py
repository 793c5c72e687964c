"""The engine core in a process of its own, and its front ends.

    factory          clients of an engine: `make_client`, `attach_client`
    channel          the channel to a process: calls become messages
    link             the sockets of one front end to the process
    engine_process   the process, as the front end that started it sees it
    attached_engine  the process, as a further front end sees it
    child            the process itself: start, serve, end
    server           its loop: messages in, steps, messages out
    front_ends       who gets which outputs, and who has left
    request_intake   how requests enter the core between two steps
    outgoing         outputs as messages, and how many are on their way
    boot             what the process is started with, and where its sockets are

What crosses is in `dovetail.transport.messages`.
"""
