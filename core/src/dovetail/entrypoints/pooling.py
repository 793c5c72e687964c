"""The methods of `LLM` for pooling models: encode, embed, classify, score, reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import RequestError
from dovetail.outputs import PoolingRequestOutput, RequestOutputKind
from dovetail.pooling_params import CLASSIFY, EMBED, REWARD, PoolingParams

if TYPE_CHECKING:
    from dovetail.engine.llm_engine import LLMEngine
    from dovetail.engine.output.scoring import TextPairs
    from dovetail.inputs import Prompt

OnError = Literal["raise", "return"]


class PoolingMethods:
    """Pooling for lists of prompts; see `LLM`.

    pooling_params: one for all prompts, one for each, or None for the model's defaults. use_tqdm,
    on_error, priority: as for `LLM.generate`. All methods raise UserError or RequestError, with the
    tasks of the model, if it does not support the task.
    """

    llm_engine: LLMEngine
    _num_requests: int

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        on_error: OnError = "raise",
    ) -> list[PoolingRequestOutput]:
        """Return the pooled result of each prompt, in the order of the prompts.

        pooling_task: the task for parameters without a task; None for the model's first task.
        """
        from dovetail.entrypoints.call_arguments import list_prompts, one_each

        _check_options(use_tqdm, on_error)
        engine = self.llm_engine
        several = list_prompts(
            prompts, limits=engine.config.limits, max_model_len=engine.max_model_len
        )
        params = one_each(pooling_params, len(several), "pooling_params")
        ranks = one_each(priority if priority is not None else 0, len(several), "priority")
        params = [_with_task(item, pooling_task) for item in params]
        return self._pool(several, params, ranks, use_tqdm=use_tqdm, on_error=on_error)

    def _pool(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        ranks: Sequence[int],
        *,
        use_tqdm: bool,
        on_error: OnError,
        names: Sequence[str] = (),
    ) -> list[PoolingRequestOutput]:
        """Return the pooled result of each prompt. ranks: priorities. names: see `run_batch`."""
        from dovetail.engine.front_end import UserRequest  # imported with the engine
        from dovetail.entrypoints.batch import run_batch

        engine = self.llm_engine
        with engine.guard:  # this call gets the outputs of all steps until it returns
            first, self._num_requests = self._num_requests, self._num_requests + len(prompts)
            requests = [
                UserRequest(
                    request_id=str(first + index),
                    prompt=prompt,
                    priority=ranks[index],
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    pooling_params=params[index],
                )
                for index, prompt in enumerate(prompts)
            ]
            outputs = run_batch(engine, requests, use_tqdm=use_tqdm, on_error=on_error, names=names)
        return [PoolingRequestOutput.of(output) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the embedding of each prompt: `output.outputs.embedding`."""
        return self.encode(prompts, pooling_params, pooling_task=EMBED, **options)

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the probability of each class for each prompt: `output.outputs.probs`."""
        return self.encode(prompts, pooling_params, pooling_task=CLASSIFY, **options)

    def reward(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Return the unchanged outputs of the classification head: `output.outputs.data`."""
        return self.encode(prompts, pooling_params, pooling_task=REWARD, **options)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[PoolingRequestOutput]:
        """Return the score of each pair of a query and a document: `output.outputs.score`.

        queries: one text for all documents, or one for each. A cross-encoder reads both texts
        together. Other models embed each text once, and the score is the cosine similarity, or the
        sum of the largest similarities of tokens (late interaction). An empty text is scored by its
        special tokens; if the tokenizer adds none, the pair is rejected. Errors name the text, such
        as "documents[1]". With on_error="return", a pair with an entry that is not a string gets an
        output with `error` set.
        """
        from dovetail.engine.output.scoring import (
            ScoringKind,
            compare_all,
            read_pairs,
            scoring_kind,
        )
        from dovetail.entrypoints.batch import rejected_output

        _check_options(use_tqdm, on_error)
        maximum = self.llm_engine.config.limits.max_prompts
        strict = on_error == "raise"
        pairs = read_pairs(queries, documents, max_texts=maximum, is_strict=strict)
        kind = scoring_kind(self.llm_engine.supported_tasks)
        params = _with_task(pooling_params, kind.value)
        run = partial(self._pool, use_tqdm=use_tqdm, on_error=on_error)
        results = {
            index: PoolingRequestOutput.of(rejected_output(f"rejected-{index}", None, error))
            for index, error in pairs.errors.items()
        }
        if kind is ScoringKind.CROSS_ENCODER:
            results |= self._score_pairs(pairs, params, run, is_strict=strict)
        else:
            texts = pairs.texts()
            count = len(texts)
            outputs = run([*texts], [params] * count, [0] * count, names=[*texts.values()])
            scores = compare_all(kind, pairs, dict(zip(texts, outputs, strict=True)))
            results |= zip(pairs.valid, scores, strict=True)
        return [results[index] for index in range(len(pairs.documents))]

    def _score_pairs(
        self,
        pairs: TextPairs,
        params: PoolingParams,
        run: Callable[..., list[PoolingRequestOutput]],
        *,
        is_strict: bool,
    ) -> dict[int, PoolingRequestOutput]:
        """Return the score of each valid pair, by index, of a cross-encoder.

        is_strict: raise the first error.
        """
        from dovetail.entrypoints.batch import rejected_output

        inputs = self.llm_engine.front.pooling_inputs
        prompts: dict[int, Prompt] = {}
        each: list[PoolingParams] = []
        results: dict[int, PoolingRequestOutput] = {}
        for index in pairs.valid:
            first, second = pairs.queries[index], pairs.documents[index]
            names = pairs.query_name(index), pairs.document_name(index)
            try:
                token_ids, start = inputs.encode_pair(
                    first, second, params.truncate_prompt_tokens, names
                )
            except RequestError as error:
                if is_strict:
                    raise
                rejection = rejected_output(f"rejected-{index}", second, error)
                results[index] = PoolingRequestOutput.of(rejection)
                continue
            prompts[index] = {"prompt_token_ids": token_ids}
            each.append(replace(params, second_text_start=start))
        names_of_documents = [pairs.document_name(index) for index in prompts]
        outputs = run([*prompts.values()], each, [0] * len(each), names=names_of_documents)
        results |= zip(prompts, outputs, strict=True)
        return results


def _check_options(use_tqdm: object, on_error: object) -> None:
    from dovetail.entrypoints.call_arguments import check_choice

    check_choice("use_tqdm", use_tqdm, (True, False))
    check_choice("on_error", on_error, ("raise", "return"))


def _with_task(params: Any, task: str | None) -> PoolingParams:
    """Return the parameters with a task. Raise RequestError if they have another one."""
    if params is None:
        return PoolingParams(task=task)
    if type(params) is not PoolingParams:
        raise RequestError(
            f"pooling_params must be PoolingParams, not {type(params).__name__}.",
            parameter="pooling_params",
        )
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise RequestError(
            f"pooling_params has the task {params.task!r}, but this call is for {task!r}; omit "
            "the task.",
            parameter="task",
        )
    return replace(params, task=task)
