"""A conversation with a server. The counterpart of `ChatSession` for `dovetail chat --url`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dovetail.cli.client.connection import Server, first_model, stream
from dovetail.cli.sampling_options import SamplingOptions, named_settings, with_settings
from dovetail.errors import RequestError
from dovetail.sampling_params import SamplingParams


class RemoteSession:
    """One conversation.

    params: sampling parameters of the next response; the server uses its defaults for parameters
    that the user did not set. messages: the messages so far, without the system prompt.
    num_dropped: always 0; the server rejects a conversation that is too long.
    """

    num_dropped = 0

    def __init__(
        self,
        server: Server,
        sampling: SamplingOptions,
        *,
        model: str | None = None,
        system: str = "",
        max_tokens: int,
    ) -> None:
        """Start a conversation.

        model: a model of the server; None for the first one that it lists.
        """
        self.model = model or first_model(server)
        self.params = sampling.apply_to(SamplingParams(), max_tokens=max_tokens)
        self.messages: list[dict[str, str]] = []
        self._server = server
        self._set = {"max_tokens", *sampling.given()}
        self._system = [{"role": "system", "content": system}] if system else []

    def set_params(self, text: str) -> None:
        """Change parameters, for example "temperature=0.2".

        Raises RequestError for an invalid setting.
        """
        self.params = with_settings(self.params, text)
        self._set.update(named_settings(text))

    def reset(self) -> None:
        """Drop all messages. The system prompt and the parameters do not change."""
        self.messages.clear()

    def answer(self, text: str, *, interrupted: Callable[[], bool]) -> Iterator[str]:
        """Yield the response to `text` in pieces, and store both messages.

        interrupted: True ends the response, and its text so far is stored. Raises RequestError if
        the server rejects the request (the messages then do not change) or ends the response with
        an error.
        """
        turns = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {name: getattr(self.params, name) for name in sorted(self._set)}
        body |= {"model": self.model, "messages": [*self._system, *turns]}
        pieces: list[str] = []
        try:
            for event in stream(
                self._server, "/v1/chat/completions", body, interrupted=interrupted
            ):
                for piece in _pieces(event):
                    pieces.append(piece)
                    yield piece
        except RequestError:
            if not pieces:
                raise
            self.messages = [*turns, {"role": "assistant", "content": "".join(pieces)}]
            raise
        self.messages = [*turns, {"role": "assistant", "content": "".join(pieces)}]


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") if isinstance(choice, dict) else None
        content = delta.get("content") if isinstance(delta, dict) else None
        if isinstance(content, str) and content:
            yield content
