"""The engine core in a separate process, and its front ends.

    factory          clients of an engine: `make_client`, `attach_client`
    channel          the channel to a process: converts calls to messages
    link             the sockets of one front end to the process
    engine_process   the process, as seen by the front end that started it
    attached_engine  the process, as seen by other front ends
    child            the process itself: start, serve, exit
    server           the process's loop: receive messages, run steps, send messages
    front_ends       the front ends, their outputs, and their disconnection
    request_intake   adds requests to the core between two steps
    outgoing         encodes outputs as messages, and limits the number of unread messages
    boot             the settings of the process, and the paths of its sockets

The messages are in `dovetail.transport.messages`.
"""
