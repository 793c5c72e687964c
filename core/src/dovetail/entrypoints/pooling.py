"""The methods of `LLM` for pooling models: encode, embed, classify, score, reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import RequestError
from dovetail.outputs import PoolingRequestOutput, RequestOutputKind
from dovetail.pooling_params import CLASSIFY, EMBED, REWARD, SCORE, PoolingParams

if TYPE_CHECKING:
    from dovetail.engine.llm_engine import LLMEngine
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
        from dovetail.engine.front_end import UserRequest  # imported with the engine
        from dovetail.entrypoints.batch import run_batch
        from dovetail.entrypoints.call_arguments import check_choice, list_prompts, one_each

        engine = self.llm_engine
        check_choice("use_tqdm", use_tqdm, (True, False))
        check_choice("on_error", on_error, ("raise", "return"))
        several = list_prompts(
            prompts, limits=engine.config.limits, max_model_len=engine.max_model_len
        )
        params = one_each(pooling_params, len(several), "pooling_params")
        ranks = one_each(priority if priority is not None else 0, len(several), "priority")
        with engine.guard:  # this call gets the outputs of all steps until it returns
            first, self._num_requests = self._num_requests, self._num_requests + len(several)
            requests = [
                UserRequest(
                    request_id=str(first + index),
                    prompt=prompt,
                    priority=ranks[index],
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    pooling_params=_with_task(params[index], pooling_task),
                )
                for index, prompt in enumerate(several)
            ]
            outputs = run_batch(engine, requests, use_tqdm=use_tqdm, on_error=on_error)
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
    ) -> list[PoolingRequestOutput]:
        """Return the score of each pair of a query and a document: `output.outputs.score`.

        queries: one text for all documents, or one for each. A cross-encoder reads both texts
        together. Other models embed each text once, and the score is the cosine similarity, or the
        sum of the largest similarities of tokens (late interaction).
        """
        from dovetail.engine.output.scoring import (
            ScoringKind,
            compare_all,
            read_pairs,
            scoring_kind,
        )

        firsts, seconds = read_pairs(queries, documents)
        kind = scoring_kind(self.llm_engine.supported_tasks)
        if kind is ScoringKind.CROSS_ENCODER:
            return self._score_pairs(firsts, seconds, pooling_params, use_tqdm)
        texts = list(dict.fromkeys((*firsts, *seconds)))
        task = kind.value
        outputs = self.encode(texts, pooling_params, pooling_task=task, use_tqdm=use_tqdm)
        return compare_all(kind, firsts, seconds, dict(zip(texts, outputs, strict=True)))

    def _score_pairs(
        self,
        firsts: Sequence[str],
        seconds: Sequence[str],
        pooling_params: PoolingParams | None,
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput]:
        inputs = self.llm_engine.front.pooling_inputs
        params = _with_task(pooling_params, SCORE)
        prompts: list[Prompt] = []
        each: list[PoolingParams] = []
        for first, second in zip(firsts, seconds, strict=True):
            token_ids, start = inputs.encode_pair(first, second, params.truncate_prompt_tokens)
            prompts.append({"prompt_token_ids": token_ids})
            each.append(replace(params, second_text_start=start))
        return self.encode(prompts, each, use_tqdm=use_tqdm)


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
