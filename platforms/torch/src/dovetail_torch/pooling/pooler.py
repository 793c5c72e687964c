"""Pools the hidden states of a step: the state of each prompt, from its first chunk to its result.

A causal prompt may be split over several steps; the pooler keeps what its result still needs.
Dimensions: T tokens of the step, R scheduled requests, D features, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from dovetail.plan import NewRequest
from dovetail.pooling_params import (
    CLASSIFY,
    EMBED,
    REWARD,
    SCORE,
    TOKEN_EMBED,
    PoolingParams,
)
from dovetail_torch.pooling.head import Activation, DenseLayer
from dovetail_torch.runner.input_batch import InputBatch

LAST, MEAN, CLS = "last", "mean", "cls"
_DEFAULT = PoolingParams()


@dataclass(frozen=True, kw_only=True)
class PoolerHead:
    """How pooled results are computed from a model's hidden states.

    pooling: "last", "mean", "cls", or "" if the model has only one vector for each token.
    normalize: the default of requests. dense: layers after pooling. classify: the classification
    head, or None for embeddings. activation: the activation of the class outputs. num_labels:
    number of classes.
    embedding_size: number of features of an embedding. dimensions: smaller numbers of features that
    the model was trained for; () for any.
    """

    pooling: str
    normalize: bool = True
    dense: tuple[DenseLayer, ...] = ()
    classify: Callable[[torch.Tensor], torch.Tensor] | None = None
    activation: Activation | None = None
    num_labels: int = 0
    embedding_size: int = 0
    dimensions: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the model supports, the default first."""
        if self.classify is not None:
            return (CLASSIFY, SCORE, REWARD) if self.num_labels == 1 else (CLASSIFY, REWARD)
        return (EMBED, TOKEN_EMBED) if self.pooling else (TOKEN_EMBED,)

    def apply(self, x_RD: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the float32 results of pooled states. All of them have the same parameters."""
        if self.classify is not None:
            logits_RL = self.classify(x_RD).float()
            activates = params.use_activation
            if activates is None:
                activates = params.task != REWARD
            return self.activation(logits_RL) if activates and self.activation else logits_RL
        x_RD = x_RD.float()
        for layer in self.dense:
            x_RD = layer(x_RD)
        if params.dimensions is not None:
            x_RD = x_RD[:, : params.dimensions]
        normalize = self.normalize if params.normalize is None else params.normalize
        return functional.normalize(x_RD, dim=-1) if normalize else x_RD

    def dummy(self, hidden_TD: torch.Tensor, num_results: int) -> None:
        """Use as much memory and time as pooling a step with `num_results` results."""
        self.apply(hidden_TD[:num_results], PoolingParams(task=self.tasks[0]))
        if self.pooling == MEAN:
            hidden_TD.float().sum(dim=0)


class Pooler:
    """Pools the requests of each step. Not thread-safe."""

    def __init__(self, head: PoolerHead) -> None:
        self.head = head
        self._params: dict[int, PoolingParams] = {}
        # By row: the sum of the states so far, the state of the first token, or all states.
        self._states: dict[int, list[torch.Tensor]] = {}

    def join(self, request: NewRequest) -> None:
        """Add a new request to its row. Delete the state of the row's previous request."""
        self._params[request.row] = request.pooling_params or _DEFAULT
        self._states.pop(request.row, None)

    def leave(self, row: int) -> None:
        """Drop the state of the row."""
        self._params.pop(row, None)
        self._states.pop(row, None)

    def second_text_start(self, row: int) -> int:
        """Return where the second text of the row's pair starts, or 0."""
        return self._params[row].second_text_start

    def needed(self, batch: InputBatch) -> np.ndarray | None:
        """Return the index of the token that each request needs, int64 [R], or None for all."""
        if self.head.pooling == MEAN or any(map(self._is_token_wise, batch.rows.tolist())):
            return None
        return self._one_each(batch)

    def pool(self, batch: InputBatch, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the results of the requests whose prompts end, float32, by position in the plan.

        hidden: [T, D], or [R, D] if the model computed only the tokens of `needed`, in this order.
        """
        counts = np.asarray(batch.plan.num_tokens)
        is_narrow = len(hidden) != batch.plan.total_num_tokens
        pooled: dict[int, torch.Tensor] = {}
        several: dict[int, torch.Tensor] = {}
        each = None if is_narrow else self._one_each(batch)
        for run, row in enumerate(batch.rows.tolist()):
            ends = bool(batch.plan.samples[run])
            is_first = batch.plan.starts[run] == 0
            if not is_narrow and (self._is_token_wise(row) or self.head.pooling == MEAN):
                first = int(batch.first_R[run])
                self._collect(row, hidden[first : first + int(counts[run])], is_first)
            elif self.head.pooling != CLS or is_first:
                index = run if each is None else int(each[run])
                self._states[row] = [hidden[index]]
                if not ends:  # the memory of hidden states is reused by the next step
                    self._states[row] = [hidden[index].clone()]
            if ends:
                target = several if self._is_token_wise(row) else pooled
                target[run] = self._finish(row, int(batch.ends[run]))
        results = dict(self._apply_all(batch, pooled, hidden.dtype))
        for run, states_TD in several.items():
            results[run] = self.head.apply(states_TD, self._params[int(batch.rows[run])])
        return results

    def _is_token_wise(self, row: int) -> bool:
        return self._params[row].task == TOKEN_EMBED or not self.head.pooling

    def _one_each(self, batch: InputBatch) -> np.ndarray:
        firsts = np.asarray(batch.first_R, np.int64)
        if self.head.pooling == CLS:
            return firsts
        return firsts + np.asarray(batch.plan.num_tokens, np.int64) - 1

    def _collect(self, row: int, states_TD: torch.Tensor, is_first: bool) -> None:
        """Keep the states of one more part of the prompt, or their sum."""
        if is_first:
            self._states[row] = []
        parts = self._states[row]
        if self._is_token_wise(row):
            parts.append(states_TD.float().clone())
            return
        sum_D = states_TD.sum(dim=0, dtype=torch.float32)
        self._states[row] = [parts[0].add_(sum_D)] if parts else [sum_D]

    def _finish(self, row: int, num_tokens: int) -> torch.Tensor:
        parts = self._states.pop(row)
        if self._is_token_wise(row):
            return torch.cat(parts)
        return parts[0] / num_tokens if self.head.pooling == MEAN else parts[0]

    def _apply_all(
        self, batch: InputBatch, pooled: Mapping[int, torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the result of each request.

        Requests with the same parameters are computed together. dtype: of the model, for its
        classification head; means are float32.
        """
        groups: dict[PoolingParams, list[int]] = {}
        for run in pooled:
            params = _without_position(self._params[int(batch.rows[run])])
            groups.setdefault(params, []).append(run)
        for params, runs in groups.items():
            x_RD = torch.stack([pooled[run] for run in runs])
            if self.head.classify is not None:
                x_RD = x_RD.to(dtype)
            yield from zip(runs, self.head.apply(x_RD, params), strict=True)


def _without_position(params: PoolingParams) -> PoolingParams:
    """Return the parameters that change the computation, without `second_text_start`."""
    return PoolingParams(
        task=params.task,
        dimensions=params.dimensions,
        normalize=params.normalize,
        use_activation=params.use_activation,
    )
