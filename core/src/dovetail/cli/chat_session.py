"""A conversation with an engine: stores the messages and streams the responses.

If the conversation exceeds the model's maximum length, the oldest messages are dropped. This module
does not read the keyboard and does not print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dovetail.cli.sampling_options import with_settings
from dovetail.errors import RequestError
from dovetail.outputs import RequestOutputKind

if TYPE_CHECKING:
    from dovetail.engine.llm_engine import LLMEngine
    from dovetail.interfaces import Tokenizer
    from dovetail.sampling_params import SamplingParams

Message = dict[str, str]

_ROOM_SHARE = 4
"""The part of the model's maximum length that is reserved for a response: 1/4."""
_HALF_A_CHARACTER = "\ufffd"


class ChatSession:
    """One conversation.

    params: sampling parameters of the next response; may be replaced between responses. messages:
    the messages so far, without the system prompt; owned by the session. num_dropped: messages that
    were dropped before the last response.
    """

    def __init__(
        self,
        engine: LLMEngine,
        params: SamplingParams,
        *,
        system: str = "",
        chat_template: str | None = None,
    ) -> None:
        """Start a conversation.

        Raises RequestError if there is no tokenizer or no chat template.
        """
        if engine.tokenizer is None:
            raise RequestError(
                "A chat needs a tokenizer; start the engine without skip_tokenizer_init."
            )
        self.params = params
        self.messages: list[Message] = []
        self.num_dropped = 0
        self._engine = engine
        self._tokenizer: Tokenizer = engine.tokenizer
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._template = chat_template
        self._num_responses = 0
        # Reports a missing or invalid template before the user types a message.
        self._encode([_user("?")])

    def set_params(self, text: str) -> None:
        """Change parameters, for example "temperature=0.2".

        Raises RequestError for an invalid setting.
        """
        self.params = with_settings(self.params, text)

    def reset(self) -> None:
        """Drop all messages. The system prompt and the parameters do not change."""
        self.messages.clear()

    def answer(self, text: str, *, interrupted: Callable[[], bool]) -> Iterator[str]:
        """Yield the response to `text` in pieces of complete characters, and store both messages.

        interrupted: called after each step; True ends the response, and its text so far is stored.
        Raises RequestError before the first piece if the request is rejected; then the messages do
        not change.
        """
        turns, token_ids = self._fit([*self.messages, _user(text)])
        request_id = f"chat-{self._num_responses}"
        self._engine.add_request(
            request_id,
            {"prompt_token_ids": token_ids},
            self.params,
            output_kind=RequestOutputKind.DELTA,
        )
        self._num_responses += 1
        self.num_dropped = len(self.messages) + 1 - len(turns)
        pieces: list[str] = []
        try:
            for piece in self._stream(request_id, interrupted):
                pieces.append(piece)
                yield piece
        finally:
            self._engine.abort_request(request_id)
            self._engine.discard_ended([request_id])
            self.messages = [*turns, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, request_id: str, interrupted: Callable[[], bool]) -> Iterator[str]:
        engine = self._engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.error is not None:
                    raise RequestError(output.error)
                for completion in output.outputs:
                    # The last piece may end with an incomplete character, which is dropped.
                    ended = completion.finished()
                    text = completion.text
                    yield text.rstrip(_HALF_A_CHARACTER) if ended else text
            if interrupted():
                engine.abort_request(request_id)

    def _fit(self, turns: list[Message]) -> tuple[list[Message], list[int]]:
        """Return the latest messages that leave room for a response, and their token ids."""
        longest = self._engine.max_model_len
        room = longest // _ROOM_SHARE
        if self.params.max_tokens is not None:
            room = min(room, self.params.max_tokens)
        token_ids = self._encode(turns)
        while len(token_ids) > longest - room and len(turns) > 1:
            turns = turns[2:]
            token_ids = self._encode(turns)
        return turns, token_ids

    def _encode(self, turns: list[Message]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [*self._system, *turns], chat_template=self._template
        )
        return self._tokenizer.encode(text, add_special_tokens=False)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
