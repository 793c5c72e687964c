"""`LLM`: offline generation for lists of prompts.

Importing this module is fast: the engine is imported when an `LLM` is created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from dovetail.config.engine_args import EngineArgs
from dovetail.entrypoints.pooling import PoolingMethods
from dovetail.errors import ConfigError, RequestError
from dovetail.outputs import RequestOutputKind

if TYPE_CHECKING:
    from types import TracebackType

    from dovetail.engine.llm_engine import LLMEngine
    from dovetail.inputs import Prompt
    from dovetail.interfaces import Tokenizer
    from dovetail.outputs import RequestOutput
    from dovetail.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
OnError = Literal["raise", "return"]


class LLM(PoolingMethods):
    """A model that generates text, or computes pooled results, for lists of prompts.

    `LLM("path/to/model", max_num_seqs=64, scheduler_cls="priority", …)`: the options are those of
    `EngineArgs`. Use it as a context manager, or call `shutdown`, to release all resources.
    Several threads may call it; one call runs at a time, the others wait.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Load the model and start the engine. Raise a DovetailError if that fails."""
        from dovetail.plugins.loading import paused_garbage_collection

        with paused_garbage_collection():
            from dovetail.engine.llm_engine import LLMEngine  # slow to import

        args = EngineArgs.from_kwargs(model=model, **options)
        self.llm_engine: LLMEngine = LLMEngine.from_engine_args(args)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Return one output per prompt, in the order of the prompts.

        prompts: one or several strings, lists of token ids, or mappings (`dovetail.inputs`);
            several in any iterable.
        sampling_params: one for all, one per prompt, or None for the model's defaults.
        use_tqdm: show a progress bar on stderr if it is a terminal.
        on_error: "raise" rejects the whole call, before anything runs, if one request is rejected
            (RequestError, with its index); "return" gives that request an output with `error` set,
            and runs the others.
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
        params = one_each(sampling_params, len(several), "sampling_params")
        ranks = one_each(priority if priority is not None else 0, len(several), "priority")
        with engine.guard:  # this call gets the outputs of all steps until it returns
            first, self._num_requests = self._num_requests, self._num_requests + len(several)
            requests = [
                UserRequest(
                    request_id=str(first + index),
                    prompt=prompt,
                    params=params[index],
                    priority=ranks[index],
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                for index, prompt in enumerate(several)
            ]
            return run_batch(engine, requests, use_tqdm=use_tqdm, on_error=on_error)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Return the model's next message for each conversation.

        Each completion has the attribute `message`: content, reasoning and tool calls, which the
        parsers of the model's format find in `text`.
        Raises RequestError for messages that are not plain data or larger than `LimitsConfig`
        allows. on_error: as for `generate`.

        messages: mappings with "role" and "content". A role is one of OpenAI's API or one that the
            template names. Errors name the field, such as "messages[0].role".
        chat_template: replaces the model's template.
        tools: functions that the model may call, as in OpenAI's API. tool_choice: "auto", "none",
            "required" or {"type": "function", "function": {"name": …}}; a call that is required is
            always valid. parallel_tool_calls: whether a message may have several calls.
        """
        from dovetail.entrypoints.batch import rejected_output
        from dovetail.entrypoints.call_arguments import check_choice, list_conversations, one_each
        from dovetail.entrypoints.chat_messages import constrain_chat, read_chat_tools, read_outputs

        check_choice("on_error", on_error, ("raise", "return"))
        self.llm_engine.front.check_can_generate()
        use = read_chat_tools(tools, tool_choice, parallel_tool_calls)
        render = self._chat_renderer(
            chat_template, chat_template_kwargs, add_generation_prompt, use.shown
        )
        conversations = list_conversations(messages, self.llm_engine.config.limits)
        params = one_each(sampling_params, len(conversations), "sampling_params")
        prompts: dict[int, Prompt] = {}
        rejected: dict[int, RequestOutput] = {}
        for index, (name, conversation) in enumerate(conversations.items()):
            try:
                prompts[index] = render(name, conversation)
                params[index] = constrain_chat(self.llm_engine, params[index], use, prompts[index])
            except RequestError as error:
                if on_error == "raise":
                    raise
                rejected[index] = rejected_output(f"rejected-{index}", None, error)
        outputs = self.generate(
            list(prompts.values()),
            [params[index] for index in prompts],
            use_tqdm=use_tqdm,
            on_error=on_error,
        )
        read_outputs(self.llm_engine.front.parsers, use, outputs)
        answered = dict(zip(prompts, outputs, strict=True)) | rejected
        return [answered[index] for index in range(len(conversations))]

    def _chat_renderer(
        self,
        chat_template: Any,
        kwargs: Any,
        add_generation_prompt: Any,
        tools: Sequence[Mapping[str, Any]],
    ) -> Callable[[str, Any], Prompt]:
        """Return a function that renders a conversation to a prompt: its text and token ids.

        The function's first argument is the name of the conversation in errors.
        """
        from dovetail.engine.messages.history import (
            CallForm,
            call_form,
            has_calls,
            prepare_history,
        )
        from dovetail.entrypoints.call_arguments import check_template_arguments, read_conversation
        from dovetail.value_checks import plain_text

        tokenizer, inputs = self.get_tokenizer(), self.llm_engine.front.inputs
        limits = self.llm_engine.config.limits
        variables = check_template_arguments(chat_template, kwargs, add_generation_prompt)
        if tools:
            variables["tools"] = list(tools)
        if chat_template is not None:
            chat_template = plain_text(chat_template)  # calls no method of a subclass

        def render(name: str, conversation: Any) -> Prompt:
            known = tokenizer.chat_templates.values() if chat_template is None else [chat_template]
            messages = read_conversation(
                name,
                conversation,
                known,
                limits=limits,
                max_prompt_chars=inputs.max_prompt_chars,
            )
            has = has_calls(messages)
            form = call_form(tokenizer, chat_template) if has else CallForm()
            text = tokenizer.apply_chat_template(
                prepare_history(messages, form, name=name),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            rendered: Any = {"prompt": text, "prompt_token_ids": inputs.encode_chat(text)}
            prompt: Prompt = rendered
            return prompt

        return render

    def process(
        self,
        data: Any,
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
        on_error: OnError = "return",
    ) -> Any:
        """Return the result of the IO processor (`EngineArgs.io_processor`) for `data`.

        sampling_params: for prompts without parameters; None for the model's defaults. on_error:
            as for `generate`; here a rejected prompt does not affect the others, and the processor
            reports it.
        Raises ConfigError if the engine has no IO processor, RequestError for invalid data.
        """
        from dovetail.interfaces import IORequest, IOResult  # imported with the engine

        processor = self.llm_engine.io_processor
        if processor is None:
            raise ConfigError("This engine has no IO processor; start it with io_processor='…'.")
        request = IORequest(data=data, sampling_params=sampling_params)
        batch = processor.pre_process(request)
        params = [prompt.sampling_params or sampling_params for prompt in batch.prompts]
        outputs = self.generate(
            [prompt.prompt for prompt in batch.prompts],
            [param or self.get_default_sampling_params() for param in params],
            use_tqdm=use_tqdm,
            priority=[prompt.priority for prompt in batch.prompts],
            on_error=on_error,
        )
        return processor.post_process(IOResult(request=request, batch=batch, outputs=outputs))

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raise RequestError if the engine has none."""
        if self.llm_engine.tokenizer is None:
            raise RequestError("This engine has no tokenizer, because skip_tokenizer_init=True.")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's default parameters, which apply to prompts without parameters."""
        return self.llm_engine.default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return False if requests are running."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the device memory of weights and KV cache until `wake_up` (docs/device_memory.md).

        level: 1 keeps the weights in host memory, 2 discards them. Raises UserError without
        `enable_sleep_mode`, while requests are unfinished, or if the engine is asleep.
        """
        self.llm_engine.sleep(level)

    def wake_up(self, tags: Iterable[str] = ()) -> None:
        """Allocate the memory of `tags` again, or all memory if empty. Then requests can run.

        tags: "weights", "kv_cache". Raises UserError for an unknown tag or if the engine is not
        asleep, CapacityError if a device has too little memory; the call can then be repeated.
        """
        self.llm_engine.wake_up(tags)

    def shutdown(self) -> None:
        """Shut the engine down. May be called twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
