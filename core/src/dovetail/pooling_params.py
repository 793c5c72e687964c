"""The pooling parameters of a request: one result for the whole prompt, or one for each token.

The checks here do not depend on a model. The input processor checks what needs the model's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.errors import RequestError
from dovetail.value_checks import check_flag, check_integer, invalid, with_known_names

EMBED = "embed"
TOKEN_EMBED = "token_embed"
CLASSIFY = "classify"
SCORE = "score"
REWARD = "reward"
POOLING_TASKS = (EMBED, TOKEN_EMBED, CLASSIFY, SCORE, REWARD)
EMBEDDING_TASKS = (EMBED, TOKEN_EMBED)

MAX_DIMENSIONS = 2**20
MAX_TOKENS = 2**31 - 1
WHOLE_LENGTH = -1
"""The value of `truncate_prompt_tokens` that stands for the model's maximum length."""


@with_known_names
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The pooling parameters of a request. Frozen, and checked at construction.

    task: one of `POOLING_TASKS` that the model supports; None for the model's first task.
        "embed": one vector. "token_embed": one vector for each token, as late interaction needs.
        "classify": the probabilities of all classes. "score": the score of a pair of texts by a
        cross-encoder. "reward": the unchanged outputs of the classification head.
    dimensions: number of leading features of embeddings to keep (Matryoshka embeddings); None for
    all. normalize: scale embeddings to length 1; None for the model's default. use_activation:
        whether the outputs of a classification head become probabilities or scores; None for yes,
        except for "reward".
    truncate_prompt_tokens: maximum number of tokens of the prompt, of which the first are kept, and
        the special tokens at its end; -1 for the model's maximum length; None to reject longer
        prompts.
    second_text_start: position of the first token of the second text of a pair, for models that
        distinguish the two; 0 for one text.
    Raises RequestError, naming the field.
    """

    task: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    second_text_start: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise RequestError, naming the field, if a value is not valid."""
        if self.task is not None and (type(self.task) is not str or self.task not in POOLING_TASKS):
            raise invalid("task", self.task, f"one of {', '.join(POOLING_TASKS)}")
        check_integer("dimensions", self.dimensions, 1, MAX_DIMENSIONS, optional=True)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        length = self.truncate_prompt_tokens
        check_integer("truncate_prompt_tokens", length, WHOLE_LENGTH, MAX_TOKENS, optional=True)
        if length == 0:
            raise invalid("truncate_prompt_tokens", length, "-1 or at least 1")
        check_integer("second_text_start", self.second_text_start, 0, MAX_TOKENS)
        if self.task is not None:
            self._check_task(self.task)

    def _check_task(self, task: str) -> None:
        embeds = task in EMBEDDING_TASKS
        unused = (
            ("use_activation", self.use_activation) if embeds else ("dimensions", self.dimensions),
            ("use_activation", None) if embeds else ("normalize", self.normalize),
        )
        for name, value in unused:
            if value is not None:
                raise RequestError(
                    f"{name}={value} has no effect on the task {task!r}; omit it.",
                    parameter=name,
                )
