"""`dovetail serve`: serves a model over HTTP, with the OpenAI API."""

from __future__ import annotations

from dataclasses import field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from dovetail.cli.engine_options import EngineOptions, engine_args
from dovetail.cli.frame.config_file import ConfigOption
from dovetail.cli.frame.help_page import more_options
from dovetail.processes.log_output import configure_logs
from dovetail_server.settings import ServerSettings

SERVER_GROUP = Group("Server options", sort_key=1)
MORE_GROUP = more_options("server", sort_key=8)
MAIN = (
    "host",
    "port",
    "api_processes",
    "max_waiting",
    "strict_params",
    "request_timeout_s",
    "drain_timeout_s",
    "api_keys",
    "api_key_file",
    "ssl_certfile",
    "ssl_keyfile",
    "verbose",
    "log_level",
    "log_format",
)
"""The options that `--help` shows; `--help-all` shows all."""

HELP = {
    "host": "Address to listen on.",
    "port": "Port to listen on; 0: a free port.",
    "api_processes": "Number of processes that serve requests for one engine.",
    "max_waiting": "Number of requests that may wait, in addition to the running requests.",
    "strict_params": "Reject requests with unknown fields.",
    "allow_request_templates": "Accept chat templates in requests.",
    "request_timeout_s": "Time limit of a request.",
    "max_body_bytes": "Maximum size of the body of a request.",
    "max_json_values": "Maximum number of values in the body of a request.",
    "max_total_body_bytes": "Maximum size of all bodies that are being received.",
    "max_header_bytes": "Maximum size of the request line and headers.",
    "max_connections": "Maximum number of open connections.",
    "header_timeout_s": "Time in which a client must send the headers.",
    "body_timeout_s": "Time in which a client must send the body.",
    "write_timeout_s": "Time after which a client that does not read is disconnected.",
    "keep_alive_s": "Time after which an idle connection is closed.",
    "drain_timeout_s": "Time that running requests have to finish after SIGTERM.",
    "api_keys": "API key of clients; may be given several times. Visible to other local users.",
    "api_key_file": "File with API keys of clients, one per line.",
    "admin_keys": "Key of operators for the admin routes; may be given several times.",
    "admin_host": "Address of the admin port.",
    "admin_port": "Serve the admin routes on this separate port.",
    "cache_salt_by": "Share cached prefixes only within the same API key (key) or user (user).",
    "allowed_hosts": "Accepted host name in the Host header; may be given several times.",
    "cors_origins": "Origin of web pages that may send requests; may be given several times.",
    "ssl_certfile": "Certificate file for TLS.",
    "ssl_keyfile": "Key file for TLS.",
    "ssl_ca_certs": "File with CA certificates; clients then need a certificate from such a CA.",
    "storage_dir": "Directory for stored responses, files and batches; by default a temporary one.",
    "max_file_bytes": "Maximum size of a file.",
    "max_stored_files": "Maximum number of stored files of an API key.",
    "max_stored_file_bytes": "Maximum size of the stored files of an API key.",
    "file_lifetime_s": "Time after which a stored file is deleted.",
    "upload_timeout_s": "Time in which a client must send a file.",
    "max_batch_lines": "Maximum number of lines of a batch.",
    "max_unfinished_batches": "Maximum number of unfinished batches of an API key.",
    "batch_timeout_s": "Time after which the remaining lines of a batch fail.",
    "batch_concurrency": "Batch lines executed at a time; by default half of --max-num-seqs.",
    "max_stored_responses": "Maximum number of stored responses of an API key.",
    "max_stored_response_bytes": "Maximum size of the stored responses of an API key.",
    "response_lifetime_s": "Time after which a stored response is deleted.",
    "verbose": "Log the startup phases and the memory usage.",
    "vllm_metric_names": "Show metrics also under the names that dashboards for vLLM use.",
    "no_web_page": "Do not serve the web page at /.",
    "otlp_traces_endpoint": "Address (OTLP, HTTP) that receives traces of requests.",
    "trace_functions": "Record every function call of the server in this file; slow.",
    "log_requests": "Log each request when it ends, without prompts and outputs.",
    "log_level": "debug, info, warning or error.",
    "log_format": "text or json.",
}

FLAGS = {
    "api_keys": "--api-key",
    "admin_keys": "--admin-key",
    "allowed_hosts": "--allowed-host",
    "cors_origins": "--cors-origin",
}
"""Flags that can be repeated, by the name of the setting."""


def _server_options() -> Any:
    hints = get_type_hints(ServerSettings)
    options = []
    for item in fields(ServerSettings):
        group = SERVER_GROUP if item.name in MAIN else MORE_GROUP
        parameter = Parameter(
            name=FLAGS.get(item.name),
            help=HELP[item.name],
            group=group,
            negative="",
            show_default=item.default not in (None, ()),
        )
        hint: Any = Annotated[hints[item.name], parameter]
        options.append((item.name, hint, field(default=item.default)))
    options_cls = make_dataclass("ServerOptions", options, frozen=True, kw_only=True)
    options_cls.__module__ = (
        __name__  # "types" is a module whose classes the parser treats as built-in
    )
    return options_cls


if TYPE_CHECKING:
    ServerOptions = ServerSettings
else:
    ServerOptions = _server_options()

DEFAULTS = ServerOptions()


def serve(
    *,
    config_file: ConfigOption = None,
    server: Annotated[ServerOptions, Parameter(name="*")] = DEFAULTS,
    engine: Annotated[EngineOptions, Parameter(name="*")],
) -> int:
    """Serve a model over HTTP, with the OpenAI API."""
    settings = ServerSettings(**{item.name: getattr(server, item.name) for item in fields(server)})
    args = engine_args(engine)

    # Imported here, because --help and errors in options need no server.
    from dovetail_server.listening import listen, tls_context
    from dovetail_server.transport.keys import client_keys

    client_keys(settings)
    tls_context(settings)
    public, admin = listen(settings.host, settings.port), None
    if settings.admin_port is not None:
        admin = listen(settings.admin_host, settings.admin_port, option="--admin-port")
    config = args.create_engine_config()
    from dovetail_server.server import Listeners, make_state, run_server

    configure_logs(settings.log_level, settings.log_format, more=("dovetail_server",))

    def make_engine() -> Any:
        from dovetail.engine.async_llm import AsyncLLM
        from dovetail.engine.supervision.rules import SupervisionRules

        return AsyncLLM(config, max_waiting=settings.max_waiting, rules=SupervisionRules())

    state = make_state(settings, config.model.served_model_name)
    return run_server(state, Listeners(public=public, admin=admin), make_engine)
