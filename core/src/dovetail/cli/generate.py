"""`dovetail generate`: generates text for prompts.

A terminal shows each prompt above its output. A pipe gets only the outputs, in order, separated by
empty lines, or with `--json` one JSON object per line. A rejected prompt is reported on stderr, and
the other prompts are processed; the exit code is then 2.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dovetail.cli.engine_options import EngineOptions, engine_args
from dovetail.cli.frame.config_file import ConfigOption
from dovetail.cli.frame.shell_text import shell_message
from dovetail.cli.sampling_options import NO_OVERRIDES, SamplingOptions
from dovetail.cli.terminal import print_message, printable, read_text_file, replace_unencodable
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.config import EngineArgs
    from dovetail.outputs import RequestOutput

MAX_TOKENS = 64
_FILE_HELP = 'File with one prompt per line; "-": stdin.'
_CHAT_HELP = "Apply the model's chat template to each prompt, as a user message."
_JSON_HELP = "Print one JSON object per line."


def generate(
    *prompts: Annotated[str, Parameter(help="Prompts to continue.")],
    prompts_file: Annotated[
        str | None, Parameter(help=_FILE_HELP, allow_leading_hyphen=True)
    ] = None,
    chat: Annotated[bool, Parameter(negative="", help=_CHAT_HELP)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help=_JSON_HELP)] = False,
    config: ConfigOption = None,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = NO_OVERRIDES,
    engine: Annotated[EngineOptions, Parameter(name="*")],
) -> int:
    """Generate text for prompts."""
    replace_unencodable()
    all_prompts = [*prompts, *_read_prompts(prompts_file)]
    if not all_prompts:
        if prompts_file is not None:
            raise ConfigError(f"--prompts-file {prompts_file} contains no prompt.")
        raise ConfigError(
            "No prompt was given; write prompts after the options, or use --prompts-file FILE."
        )
    sampling.check()
    outputs = _answer(engine_args(engine), sampling, all_prompts, chat=chat)
    shown = [
        replace(output, prompt=text) for output, text in zip(outputs, all_prompts, strict=True)
    ]
    if as_json:
        for output in shown:
            print(json.dumps(_facts(output), ensure_ascii=False))
    elif sys.stdout.isatty():
        _show(shown)
    else:
        print("\n\n".join(_text(output) for output in shown if output.error is None))
    return _print_rejections(shown)


def _answer(
    args: EngineArgs, sampling: SamplingOptions, prompts: Sequence[str], *, chat: bool
) -> list[RequestOutput]:
    from dovetail.entrypoints.llm import LLM  # slow to import

    with LLM(**vars(args)) as llm:
        params = sampling.apply_to(llm.get_default_sampling_params(), max_tokens=MAX_TOKENS)
        if not chat:
            return llm.generate(prompts, params, on_error="return")
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return llm.chat(conversations, params, on_error="return")


def _read_prompts(file: str | None) -> list[str]:
    if file is None:
        return []
    # `splitlines` would also split at other characters in a prompt, such as U+2028.
    lines = read_text_file("--prompts-file", file).split("\n")
    return [line for line in lines if line.strip()]


def _text(output: RequestOutput) -> str:
    return output.outputs[0].text if output.outputs else ""


def _show(outputs: Sequence[RequestOutput]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for index, output in enumerate(outputs):
        if index:
            console.print()
        console.print(Text(printable(output.prompt or ""), style="bold cyan"))
        console.print(Text(printable(_text(output).strip("\n"))))


def _facts(output: RequestOutput) -> dict[str, Any]:
    """Return one output as a JSON object, with times in seconds."""
    record: dict[str, Any] = {"prompt": output.prompt}
    if output.error is not None or not output.outputs:
        return {**record, "error": output.error}
    completion, metrics = output.outputs[0], output.metrics
    first, last = metrics.first_token_ns, metrics.finished_ns
    return {
        **record,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_s": None if first is None else (first - metrics.arrival_ns) / 1e9,
        "latency_s": None if last is None else (last - metrics.arrival_ns) / 1e9,
    }


def _print_rejections(outputs: Sequence[RequestOutput]) -> int:
    rejected = [(index, out.error) for index, out in enumerate(outputs, 1) if out.error is not None]
    for position, error in rejected:
        where = f"prompt {position}: " if len(outputs) > 1 else ""
        print_message(f"dovetail: {where}{shell_message(error)}")
    return 2 if rejected else 0
