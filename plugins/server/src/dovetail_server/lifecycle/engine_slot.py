"""The engine of a server while it loads, runs, fails and stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dovetail.engine.async_llm import AsyncLLM
from dovetail.errors import DovetailError, EngineDeadError, StalledError, UnavailableError
from dovetail_server.protocol.errors import unavailable

logger = logging.getLogger(__name__)


class EngineSlot:
    """Contains the engine, or its error. draining: whether new requests are rejected.

    reported_problem: in an API process, the problem that the main process has reported, or "".
    """

    def __init__(self, served_model_name: str) -> None:
        self.served_model_name = served_model_name
        self.draining = False
        self.reported_problem = ""
        self._llm: AsyncLLM | None = None
        self._owned: AsyncLLM | None = None

    async def load(self, make: Callable[[], AsyncLLM]) -> AsyncLLM:
        """Create the engine in a thread, which blocks until the model is loaded."""
        self._owned = await asyncio.to_thread(make)
        return self._owned

    def put(self, llm: AsyncLLM) -> None:
        """Set the engine that serves requests."""
        self._llm = llm

    def replace(self, llm: AsyncLLM) -> None:
        """Serve requests with another engine, after the previous engine has exited."""
        before, self._llm, self._owned = self._owned, llm, llm
        if before is not None:
            before.shutdown()

    @property
    def llm(self) -> AsyncLLM:
        """The engine. Raises APIError while it is not loaded."""
        if self._llm is None:
            raise unavailable("The model is being loaded. Try again later.", code="loading")
        return self._llm

    @property
    def is_loaded(self) -> bool:
        """Whether the engine is loaded."""
        return self._llm is not None

    def for_new_request(self) -> AsyncLLM:
        """Return the engine. Raise APIError if new requests are rejected."""
        if self.draining:
            raise unavailable(
                "The server is shutting down. Send the request to another server.", code="draining"
            )
        if self.reported_problem:
            raise unavailable(f"The engine is not ready: {self.reported_problem}. Try again later.")
        return self.llm

    async def problem(self) -> str:
        """Return why the engine makes no progress, or "" for a healthy engine."""
        if self._llm is None:
            return "loading"
        if self.reported_problem:
            return self.reported_problem
        try:
            await self._llm.check_health()
        except UnavailableError:
            return "restarting"
        except StalledError:
            return "stalled"
        except (EngineDeadError, DovetailError) as error:
            logger.debug("the engine is not healthy: %s", error)
            return "failed"
        return ""

    def shutdown(self) -> None:
        """Shut down the engine. Blocks for at most a few seconds."""
        if self._owned is not None:
            self._owned.shutdown()
