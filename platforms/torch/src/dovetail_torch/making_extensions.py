"""Create the configured step extensions of a worker, in order.

Logits processors come first; each is a separate extension.
"""

from __future__ import annotations

from dovetail.interfaces import (
    LogitsProcessorContext,
    StepExtension,
    StepExtensionContext,
    WorkerContext,
)
from dovetail.plugins.construction import Options, make_instance, plugin_name
from dovetail_torch.runner.loaded_model import LoadedModel
from dovetail_torch.sampling.processors import ProcessorExtension


def make_extensions(context: WorkerContext, loaded: LoadedModel) -> dict[str, StepExtension]:
    """Return the extensions, by the names that messages use for them.

    Raises PluginError if an extension cannot be loaded or created, ConfigError for invalid options.
    """
    plugins, limits = context.plugins, loaded.limits

    def processor_context(options: Options) -> LogitsProcessorContext:
        return LogitsProcessorContext(
            vocab_size=loaded.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            device=limits.device,
            options=options,
        )

    def extension_context(options: Options) -> StepExtensionContext:
        return StepExtensionContext(
            model=loaded.model,
            vocab_size=loaded.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            device=limits.device,
            rank=context.rank,
            world_size=context.world_size,
            options=options,
        )

    created: dict[str, StepExtension] = {}
    for kind, references, make_context in (
        ("logits_processor", context.config.logits_processors, processor_context),
        ("step_extension", context.config.step_extensions, extension_context),
    ):
        for reference in references:
            extension = make_instance(plugins, kind, reference, make_context)
            name = f"the {kind.replace('_', ' ')} {plugin_name(plugins, kind, reference)!r}"
            if name in created:  # a class of the same name in another module
                name = f"the {kind.replace('_', ' ')} {plugins.resolve(kind, reference).target!r}"
            created[name] = (
                ProcessorExtension(extension) if kind == "logits_processor" else extension
            )
    return created
