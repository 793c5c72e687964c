"""The methods of `AsyncLLM` for pooling models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.engine.front_end import FrontEnd, UserRequest
from dovetail.engine.output.scoring import ScoringKind, compare_all, read_pairs, scoring_kind
from dovetail.errors import RequestError
from dovetail.outputs import PoolingRequestOutput, RequestOutputKind
from dovetail.pooling_params import PoolingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from dovetail.engine.output.scoring import TextPairs
    from dovetail.engine.streaming.request_streamer import RequestStreamer
    from dovetail.inputs import Prompt, PromptTraits
    from dovetail.outputs import RequestOutput

LONG_TEXT_CHARS = 4096
"""Pairs of strings with more characters are tokenized in another thread."""
MANY_VALUES = 2**15
"""Larger results are converted in another thread."""
PAIRS_AT_ONCE = 64
"""Number of pairs of embeddings that are compared at a time."""


class AsyncPoolingMethods:
    """Pooling in an event loop; see `AsyncLLM`."""

    _front: FrontEnd
    _streamer: RequestStreamer

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> PoolingRequestOutput:
        """Return the pooled result of one prompt. Cancelling the call aborts the request.

        The arguments are the same as for `AsyncLLM.generate`. If the request was aborted or
        rejected by the engine, the output has no result, and the cause in `error`. Raises
        RequestError that names the parameter, CapacityError if the queue is full, and
        EngineDeadError.
        """
        user_request = UserRequest(
            request_id=request_id,
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            output_kind=RequestOutputKind.FINAL_ONLY,
            pooling_params=PoolingParams() if pooling_params is None else pooling_params,
        )
        last: RequestOutput | None = None
        outputs = self._streamer.serve(user_request, timeout_s)
        try:
            async for output in outputs:
                last = output
        finally:
            await outputs.aclose()
        assert last is not None, "a request ended without an output"
        if last.pooled is not None and len(last.pooled.values) > MANY_VALUES:
            return await asyncio.to_thread(PoolingRequestOutput.of, last)
        return PoolingRequestOutput.of(last)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        traits: PromptTraits | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the score of each pair of a query and a document, as `LLM.score` does.

        traits: the `PromptTraits` of every prompt. The output of a pair that failed has no result,
        as with `encode`. If a request raises an error, all others of the call are aborted, and the
        error names the text, such as "documents[1]".
        """
        limits = self._front.facts.config.limits
        pairs = read_pairs(queries, documents, max_texts=limits.max_prompts)
        kind = scoring_kind(self._front.facts.model_info.supported_tasks)
        params = replace(pooling_params or PoolingParams(), task=kind.value)

        async def encode(prompt: Any, params: PoolingParams, name: str) -> PoolingRequestOutput:
            prompt = {**(traits or {}), **prompt}
            try:
                return await self.encode(prompt, params, priority=priority, timeout_s=timeout_s)
            except RequestError as error:
                raise error.with_name(name) from None

        async def score_pair(index: int) -> PoolingRequestOutput:
            token_ids, start = await self._encode_pair(pairs, index, params.truncate_prompt_tokens)
            params_of_pair = replace(params, second_text_start=start)
            prompt = {"prompt_token_ids": token_ids}
            return await encode(prompt, params_of_pair, pairs.document_name(index))

        if kind is ScoringKind.CROSS_ENCODER:
            return await _all([score_pair(index) for index in range(len(pairs.documents))])
        texts = pairs.texts()
        outputs = await _all(
            [encode({"prompt": text}, params, name) for text, name in texts.items()]
        )
        pooled = dict(zip(texts, outputs, strict=True))
        return await _compare(kind, pairs, pooled)

    async def _encode_pair(
        self, pairs: TextPairs, index: int, keep_first: int | None
    ) -> tuple[list[int], int]:
        first, second = pairs.queries[index], pairs.documents[index]
        names = pairs.query_name(index), pairs.document_name(index)
        encode_pair = self._front.pooling_inputs.encode_pair
        if len(first) + len(second) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(encode_pair, first, second, keep_first, names)
        return encode_pair(first, second, keep_first, names)


async def _compare(
    kind: ScoringKind, pairs: TextPairs, pooled: Mapping[str, PoolingRequestOutput]
) -> list[PoolingRequestOutput]:
    """Return the scores, some pairs at a time, so that a cancelled call ends soon.

    A pair of long texts takes seconds if every token has a vector.
    """
    valid, scores = pairs.valid, list[PoolingRequestOutput]()
    step = 1 if kind is ScoringKind.LATE_INTERACTION else PAIRS_AT_ONCE
    for start in range(0, len(valid), step):
        part = valid[start : start + step]
        scores += await asyncio.to_thread(compare_all, kind, pairs, pooled, part)
    return scores


async def _all(
    calls: Sequence[Coroutine[Any, Any, PoolingRequestOutput]],
) -> list[PoolingRequestOutput]:
    """Return the results of all calls. If one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
