"""The settings of a server, checked once. This module imports no web server and no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from dovetail.errors import ConfigError
from dovetail.processes.log_output import FORMATS, LEVELS

KIB, MIB = 1 << 10, 1 << 20
CACHE_SALTS = ("none", "key", "user")
MAX_PORT = 65535

_MINIMUM = {"max_waiting": 0, "port": 0, "admin_port": 0}
_MAXIMUM = {"port": MAX_PORT, "admin_port": MAX_PORT, "api_processes": 256}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server. Frozen, and checked at construction.

    host, port: the listening address; port 0 for a free one. api_processes: processes that serve
    requests; with several, each accepts an equal share of the requests and bodies.
    max_waiting: requests that may wait in addition to the running ones.
    strict_params: reject unknown fields of requests. allow_request_templates: whether a request may
    have its own chat template. request_timeout_s: the default time limit of a
    request, and the largest that a client may set; None for no limit.
    max_body_bytes, max_json_values: limits of a request's body. max_total_body_bytes: limit of
    the bodies of all requests that are being received. max_header_bytes: limit of the request line
    and the headers. max_connections: open connections; further ones are rejected.
    header_timeout_s, body_timeout_s: time in which a client must send the headers and the body.
    write_timeout_s: time in which a client must read what the connection can buffer.
    keep_alive_s: time after which an idle connection is closed. vllm_metric_names: whether
    metrics also appear under names of vLLM. no_web_page: whether there is no page at /.
    otlp_traces_endpoint: address that receives traces, or None. log_requests: whether
    each request is logged. trace_functions: file that records calls of functions, or None.
    drain_timeout_s: time that running requests have to finish after SIGTERM.
    api_keys, api_key_file: keys of clients; without keys every client is served. admin_keys: keys
    of operators. admin_port: a separate port for the admin routes, at admin_host; None: they are
    served on the public port if there are admin keys, and otherwise not at all.
    cache_salt_by: "key" or "user": only requests with the same API key or `user` share cached
    prefixes. allowed_hosts: accepted names in the header "host". cors_origins: web pages that may
    send requests. ssl_certfile, ssl_keyfile, ssl_ca_certs: files for TLS; with ssl_ca_certs,
    clients need a certificate. storage_dir: directory for stored responses, files and batches;
    None: a temporary one, which is removed at the end. max_file_bytes, max_stored_files,
    max_stored_file_bytes, file_lifetime_s: limits of a file, and of the files of each API key.
    upload_timeout_s: time in which a client must send a file. max_batch_lines: lines of a
    batch. max_unfinished_batches: batches of each API key. batch_timeout_s: time after which the
    remaining lines of a batch fail. batch_concurrency: lines that are executed at the same time;
    None: half of `max_num_seqs`. max_stored_responses, max_stored_response_bytes,
    response_lifetime_s: limits of the stored responses of each API key. verbose: log the
    phases of the start and the use of memory.
    Raises ConfigError, naming the option, for an invalid value.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_processes: int = 1
    max_waiting: int = 1024
    strict_params: bool = False
    allow_request_templates: bool = False
    request_timeout_s: float | None = None
    max_body_bytes: int = 4 * MIB
    max_json_values: int = 1 << 18
    max_total_body_bytes: int = 256 * MIB
    max_header_bytes: int = 32 * KIB
    max_connections: int = 4096
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    write_timeout_s: float = 30.0
    keep_alive_s: float = 75.0
    drain_timeout_s: float = 30.0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    cache_salt_by: str = "none"
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    verbose: bool = False
    storage_dir: str | None = None
    max_file_bytes: int = 200 * MIB
    max_stored_files: int = 1000
    max_stored_file_bytes: int = 1024 * MIB
    file_lifetime_s: float = 2592000.0
    upload_timeout_s: float = 600.0
    max_batch_lines: int = 50_000
    max_unfinished_batches: int = 64
    batch_timeout_s: float = 86400.0
    batch_concurrency: int | None = None
    max_stored_responses: int = 1024
    max_stored_response_bytes: int = 64 * MIB
    response_lifetime_s: float = 86400.0
    vllm_metric_names: bool = False
    no_web_page: bool = False
    otlp_traces_endpoint: str | None = None
    log_requests: bool = False
    trace_functions: str | None = None
    log_level: str = "info"
    log_format: str = "text"

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            if str(item.type).startswith("int"):
                self._check_integer(item.name, value)
            elif str(item.type).startswith("float"):
                self._check_seconds(item.name, value)
        for name in ("host", "admin_host"):
            if not getattr(self, name):
                raise ConfigError(f"{_flag(name)} is empty; use an address such as 127.0.0.1.")
        self._check_tls()
        self._check_choice("cache_salt_by", CACHE_SALTS)
        self._check_choice("log_format", FORMATS)
        self._check_choice("log_level", LEVELS)

    def _check_integer(self, name: str, value: object) -> None:
        minimum, maximum = _MINIMUM.get(name, 1), _MAXIMUM.get(name, 2**40)
        if type(value) is not int or not minimum <= value <= maximum:
            raise ConfigError(
                f"{_flag(name)} {value!r} must be an integer from {minimum} to {maximum}."
            )

    def _check_seconds(self, name: str, value: object) -> None:
        if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
            raise ConfigError(f"{_flag(name)} {value!r} must be a positive number of seconds.")

    def _check_tls(self) -> None:
        if (self.ssl_keyfile or self.ssl_ca_certs) and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile.")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{_flag(name)} {value!r} must be one of: {', '.join(choices)}.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
