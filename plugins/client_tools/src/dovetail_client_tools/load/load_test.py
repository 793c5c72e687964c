"""A load test: warm-up, token scale, and a run for each point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dovetail.cli.client.connection import Server
from dovetail.clock import Clock
from dovetail.errors import RequestError
from dovetail_client_tools.http_client.client import HTTPClient
from dovetail_client_tools.http_client.connection import CallError
from dovetail_client_tools.load.bench_options import (
    FIXED,
    LoadOptions,
    PlannedPoint,
    RequestOptions,
)
from dovetail_client_tools.load.load_request import (
    Arrivals,
    LoadRequest,
    fixed_requests,
    sample_arrivals,
)
from dovetail_client_tools.load.load_run import LoadLimits, LoadRun
from dovetail_client_tools.load.point import Point, summarize
from dovetail_client_tools.load.prompts import (
    BodyWriter,
    PromptWriter,
    TokenScale,
    measured_scale,
)
from dovetail_client_tools.load.stream_reader import StreamReader

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROBE_WORDS = (32, 160)


class LoadTest:
    """A load test of one server.

    fields: additional fields of each request. note: function that shows progress. points: results
    of complete measurements.
    """

    def __init__(
        self,
        server: Server,
        load: LoadOptions,
        request: RequestOptions,
        fields: Mapping[str, Any],
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        self._server = server
        self._load = load
        self._request = request
        self._fields = fields
        self._clock = clock
        self._note = note
        self._path = PATHS[request.endpoint]
        self.points: list[Point] = []

    async def run(self, planned: Sequence[PlannedPoint], objectives: Mapping[str, float]) -> None:
        """Measure all points.

        Raises RequestError if the server rejects a warm-up request, UserError if the
        workload cannot be read.
        """
        requests = [self._requests(point) for point in planned]
        client = HTTPClient(self._server)
        try:
            self._note("measuring the tokens of a word")
            scale = await self._measure_scale(client)
            for index, point in enumerate(planned):
                run = self._run(client, requests[index], scale, point, index)
                record = await run.run()
                self.points.append(
                    summarize(
                        record,
                        rate=point.rate,
                        concurrency=point.concurrency,
                        objectives=objectives,
                    )
                )
        finally:
            client.close()

    def _requests(self, point: PlannedPoint) -> list[LoadRequest]:
        load = self._load
        rate = point.rate or float("inf")
        if load.workload == FIXED:
            process: Arrivals = load.arrivals or "poisson"  # type: ignore[assignment]  # checked
            times = sample_arrivals(
                process, load.num_prompts, rate, burstiness=load.burstiness, seed=load.seed
            )
            return fixed_requests(load.num_prompts, load.input_len, load.output_len, times)
        from dovetail_client_tools.load.lab_workloads import lab_requests, read_spec

        spec = read_spec(load.workload, load.num_prompts, load.arrivals, load.burstiness)
        return lab_requests(spec, rate=rate, seed=load.seed, max_model_len=load.max_model_len)

    def _run(
        self,
        client: HTTPClient,
        requests: list[LoadRequest],
        scale: TokenScale,
        point: PlannedPoint,
        index: int,
    ) -> LoadRun:
        load = self._load
        # Each point has its own prompts, so that the server finds none in its prefix cache.
        writer = PromptWriter(scale, f"{load.seed} {index}")
        is_chat = self._request.endpoint == "chat"
        bodies = BodyWriter(requests, writer, fields=self._fields, is_chat=is_chat)
        limits = LoadLimits(
            is_closed=not point.rate,
            max_in_flight=point.concurrency,
            timeout_s=self._request.timeout_s,
            duration_s=load.duration_s,
        )
        name = f"{point.rate:g} requests/s" if point.rate else f"{point.concurrency} in flight"
        step = max(1, len(requests) // 100)

        def show(ended: int, failed: int) -> None:
            if ended % step == 0:
                self._note(f"{name}: {ended:,} of {len(requests):,} requests, {failed:,} failed")

        return LoadRun(
            client, self._path, requests, bodies, limits, clock=self._clock, on_done=show
        )

    async def _measure_scale(self, client: HTTPClient) -> TokenScale:
        """Send warm-up requests of two lengths, and return how the server counts tokens."""
        writer = PromptWriter(TokenScale(), f"{self._load.seed} warm-up")
        counts = {}
        for index in range(max(len(_PROBE_WORDS), self._load.warmup)):
            num_words = _PROBE_WORDS[index % 2]
            num_tokens = await self._probe(client, writer.words(f"{index}", num_words))
            counts[num_words] = num_tokens
        return measured_scale(counts)

    async def _probe(self, client: HTTPClient, text: str) -> int:
        """Return the number of prompt tokens that the server reports for a text."""
        is_chat = self._request.endpoint == "chat"
        turns = [{"role": "user", "content": text}] if is_chat else text
        name = "messages" if is_chat else "prompt"
        body = msgspec.json.encode({**self._fields, "max_tokens": 4, name: turns})
        reader = StreamReader(self._clock.now_ns, 4, lambda gap: None)
        message = client.request("POST", self._path, body)
        try:
            await client.send(message, reader, timeout_s=self._request.timeout_s)
            reader.finish()
        except CallError as error:
            raise RequestError(
                f"A request to {self._server.url}{self._path} failed: {error}"
            ) from None
        return reader.num_prompt_tokens
