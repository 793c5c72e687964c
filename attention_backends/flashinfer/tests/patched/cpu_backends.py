"""Subclasses of the backend that run on the CPU, one for each kind of simulated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import reference_kernels

from dovetail_attn_flashinfer.backend import FlashInferAttentionBackend
from dovetail_attn_flashinfer.builder import FlashInferMetadataBuilder
from dovetail_attn_flashinfer.device_facts import DeviceFacts

reference_kernels.install()

LEAST_MEMORY = {"workspace_mib": 16}


class OnCpu(FlashInferAttentionBackend):
    """The backend as on a GPU of compute capability 8.0: FA2 for all requests."""

    capability: ClassVar[int] = 80
    capabilities = replace(FlashInferAttentionBackend.capabilities, device_types=frozenset({"cpu"}))

    @classmethod
    def create_builder(cls, context):
        """Return the builder for the simulated GPU."""
        facts = DeviceFacts(
            capability=cls.capability, num_processors=reference_kernels.NUM_PROCESSORS
        )
        small = replace(context, options=LEAST_MEMORY | context.options)
        return FlashInferMetadataBuilder(small, facts)


class HopperOnCpu(OnCpu):
    """FA3 for requests with several tokens, FA2 for decodes."""

    capability = 90


class BlackwellOnCpu(OnCpu):
    """The trtllm-gen kernels, and the wrappers with FA2 for layers with a soft cap."""

    capability = 100


BACKENDS = (OnCpu, HopperOnCpu, BlackwellOnCpu)
