"""What a user can set of the HTTP server; see `trioserve.args` for what these classes are used for."""

from __future__ import annotations

import re
from typing import Any

import attrs

from trioserve.arg_fields import (
    arg,
    choice,
    fail,
    flag,
    json_object,
    keys,
    number,
    quantity,
    seconds,
    text,
    texts,
)
from trioserve.errors import InvalidConfigError

__all__ = [
    "FORM_FIELDS_SIZE",
    "OPEN_PATHS",
    "RESPONSES_IN_MEMORY",
    "RESPONSES_NOWHERE",
    "TOOL_CALL_PARSERS",
    "ServerArgs",
]

TOOL_CALL_PARSERS = (
    "auto", "none", "hermes", "qwen", "llama3_json", "mistral", "pythonic", "deepseek_v3", "deepseek_v31",
    "qwen3_xml", "qwen3_coder",
)  # fmt: skip

FORM_FIELDS_SIZE = 2**18
"""Bytes that a form may have beside its file."""

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/ping", "/docs")
"""What load balancers ask without a key, and a page that asks for one."""

RESPONSES_IN_MEMORY, RESPONSES_NOWHERE = "memory", "none"
"""What `responses_store` may be beside the path of a file."""


def _port(value: Any) -> int:
    try:
        port = int(value)
    except (TypeError, ValueError):
        raise fail("port", value, "an integer from 0 to 65535") from None
    if isinstance(value, bool) or not 0 <= port <= 65535:
        raise fail("port", value, "an integer from 0 to 65535")
    return port


def _positive_seconds(field: str) -> Any:
    return number(field, allowed="a number of seconds > 0", accepts=lambda v: v > 0)


def _limit(name: str, help_text: str) -> Any:
    """A number that is unlimited where it is not given."""
    return arg(help_text, quantity(name, least=1, auto=True), default=None)


# As browsers write them: in lower case, without the scheme's usual port, international names as xn--...
_ORIGIN = re.compile(
    r"\*|null|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?"
)


def _origins(value: Any) -> tuple[str, ...]:
    origins = texts("allowed_origins")(value)
    if not all(map(_ORIGIN.fullmatch, origins)):
        raise fail(
            "allowed_origins", value, "* or origins as browsers send them, such as https://example.com"
        )
    return origins


def _open_paths(value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else tuple(value or ())
    if given in {(), ("",)}:
        return ()
    if not all(isinstance(path, str) and path.startswith("/") for path in given):
        raise fail("open_paths", value, "paths, each beginning with /, or '' for none")
    return given


def _path(name: str, help_text: str) -> Any:
    return arg(help_text, text(name, optional=True), default=None)


@attrs.frozen(kw_only=True)
class ServerArgs:
    """What the HTTP server is to be. Wrong values raise `InvalidConfigError`, which names the field."""

    # Where it listens

    host: str = arg("address to listen on", text("host"), default="127.0.0.1")
    port: int = arg("port to listen on; 0 takes a free one", _port, default=8000)
    uds: str | None = _path("uds", "Unix socket to listen on, instead of host and port")
    fd: int | None = arg(
        "inherited listening socket, by its file descriptor, instead of host and port",
        quantity("fd", least=0, auto=True),
        default=None,
    )
    ssl_certfile: str | None = _path("ssl_certfile", "certificate chain (PEM): serve over TLS")
    ssl_keyfile: str | None = _path("ssl_keyfile", "its private key (PEM), if not in the same file")
    ssl_ca_certs: str | None = _path("ssl_ca_certs", "CA certificates (PEM): clients must have one of theirs")
    enable_ssl_refresh: bool = arg(
        "take over certificate files when they change", flag("enable_ssl_refresh"), default=True
    )
    http2: bool = arg("speak HTTP/2 too, over TLS", flag("http2"), default=False)

    # Who may come

    api_key: tuple[str, ...] = arg(
        "key(s) that clients must send as a bearer token [$TRIOSERVE_API_KEY]",
        keys("api_key"),
        default=(),
        repr=False,
    )
    """Given as text; what is kept are their SHA-256 digests (`KeyDigest`)."""
    api_key_file: str | None = _path(
        "api_key_file", "file with further keys, one per line; # begins a comment"
    )
    open_paths: tuple[str, ...] = arg("the paths that need no key; none: ''", _open_paths, default=OPEN_PATHS)
    allowed_origins: tuple[str, ...] = arg(
        "origins whose pages may call the API (CORS); *: all [none]",
        _origins,
        default=(),
    )
    allowed_methods: tuple[str, ...] = arg(
        "methods that such pages may use", texts("allowed_methods"), default=("GET", "POST", "OPTIONS")
    )
    allowed_headers: tuple[str, ...] = arg(
        "headers that such pages may send",
        texts("allowed_headers"),
        default=("Authorization", "Content-Type", "X-Api-Key", "X-Request-Id", "X-Request-Timeout"),
    )
    allow_credentials: bool = arg(
        "let such pages send cookies; not with *", flag("allow_credentials"), default=False
    )
    trust_request_chat_template: bool = arg(
        "let requests bring their own chat template", flag("trust_request_chat_template"), default=False
    )

    default_chat_template_kwargs: dict[str, Any] = arg(
        "what the chat template gets, unless a request's chat_template_kwargs say otherwise",
        json_object("default_chat_template_kwargs"),
        factory=dict,
    )

    tool_call_parser: str = arg(
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}; auto: as its chat template shows",
        choice("tool_call_parser", TOOL_CALL_PARSERS),
        default="auto",
    )
    exclude_tools_when_tool_choice_none: bool = arg(
        "do not show tools to the chat template where tool_choice is none",
        flag("exclude_tools_when_tool_choice_none"),
        default=False,
    )

    # What answers tell

    return_tokens_as_token_ids: bool = arg(
        "name tokens in logprobs as token_id:42, unless a request says otherwise",
        flag("return_tokens_as_token_ids"),
        default=False,
    )
    enable_force_include_usage: bool = arg(
        "tell the usage in every chunk of every stream of (chat) completions",
        flag("enable_force_include_usage"),
        default=False,
    )

    # Which routes there are beside the usual ones, or not

    disable_docs: bool = arg("serve neither /docs nor /openapi.json", flag("disable_docs"), default=False)
    enable_tokenizer_info_endpoint: bool = arg(
        "serve /tokenizer_info, with the tokenizer's configuration and the chat template",
        flag("enable_tokenizer_info_endpoint"),
        default=False,
    )
    enable_control_routes: bool = arg(
        "serve /pause, /resume, /sleep, /wake_up and the like, which steer the engine for all",
        flag("enable_control_routes"),
        default=False,
    )

    enable_lora_updates: bool = arg(
        "let clients load and unload LoRA adapters", flag("enable_lora_updates"), default=False
    )
    lora_directories: tuple[str, ...] = arg(
        "directories in which adapters that clients load must lie; / allows all [none]",
        texts("lora_directories"),
        default=(),
    )

    # How much is taken at a time

    max_connections: int | None = _limit(
        "max_connections", "open connections [what the limit of open files allows]"
    )
    max_connections_per_address: int | None = _limit(
        "max_connections_per_address", "open connections of one client address [no limit]"
    )
    max_concurrent_requests: int | None = _limit(
        "max_concurrent_requests", "requests for generation under way at a time [no limit]"
    )
    max_concurrent_requests_per_key: int | None = _limit(
        "max_concurrent_requests_per_key",
        "the same, of one API key (without keys: of one address) [no limit]",
    )
    max_requests_per_minute_per_key: int | None = _limit(
        "max_requests_per_minute_per_key",
        "requests for generation that one API key (or address) may begin in a minute [no limit]",
    )
    max_body_size: int = arg(
        "bytes of a request body", quantity("max_body_size", least=1), default=16 * 2**20
    )
    max_audio_size: int = arg(
        "bytes of an audio file", quantity("max_audio_size", least=1), default=25 * 2**20
    )
    max_audio_duration: float = arg(
        "seconds of audio in one file", _positive_seconds("max_audio_duration"), default=7200.0
    )
    max_audio_decode_time: float = arg(
        "seconds that decoding it may take", _positive_seconds("max_audio_decode_time"), default=30.0
    )
    max_header_size: int = arg(
        "bytes of a request's headers", quantity("max_header_size", least=1024), default=64 * 1024
    )
    max_json_depth: int = arg(
        "levels to which a request body may be nested", quantity("max_json_depth", least=1), default=128
    )

    # What is kept

    responses_store: str = arg(
        "where responses are kept: memory, none, or the path of an SQLite file",
        text("responses_store"),
        default=RESPONSES_IN_MEMORY,
    )
    responses_store_max_responses: int = arg(
        "responses that are kept", quantity("responses_store_max_responses", least=1), default=10_000
    )
    responses_store_max_bytes: int = arg(
        "bytes of kept responses, with their inputs and events",
        quantity("responses_store_max_bytes", least=1),
        default=256 * 2**20,
    )
    responses_store_ttl: float = arg(
        "seconds that a response is kept after its last use",
        _positive_seconds("responses_store_ttl"),
        default=30 * 86400.0,
    )
    responses_max_background: int = arg(
        "responses under way in the background", quantity("responses_max_background", least=1), default=64
    )

    # How long things may take

    request_timeout: float | None = arg(
        "seconds that a request may take, from its headers to its last token [no limit]",
        lambda value: None if value is None else _positive_seconds("request_timeout")(value),
        default=None,
    )
    health_timeout: float = arg(
        "seconds in which the engine must answer a health check",
        _positive_seconds("health_timeout"),
        default=5.0,
    )
    sse_keep_alive_interval: float = arg(
        "seconds without a token after which a stream gets a comment, and its headers first; 0: never",
        seconds("sse_keep_alive_interval"),
        default=15.0,
    )
    body_timeout: float = arg(
        "seconds in which a request's body must have come", _positive_seconds("body_timeout"), default=60.0
    )
    shutdown_timeout: float = arg(
        "seconds that requests have to finish after SIGTERM",
        seconds("shutdown_timeout"),
        default=30.0,
    )
    keep_alive_timeout: float = arg(
        "seconds an idle connection stays open", seconds("keep_alive_timeout"), default=5.0
    )
    write_timeout: float = arg(
        "seconds without progress after which a client that does not read is dropped",
        seconds("write_timeout"),
        default=30.0,
    )
    websocket_ping_interval: float = arg(
        "seconds without a byte after which the client of a WebSocket gets a ping; 0: never",
        seconds("websocket_ping_interval"),
        default=20.0,
    )
    websocket_ping_timeout: float = arg(
        "seconds after a ping in which such a client must be heard, or it is dropped",
        _positive_seconds("websocket_ping_timeout"),
        default=20.0,
    )
    realtime_idle_timeout: float = arg(
        "seconds without an event after which a session of /v1/realtime that has nothing to do is closed",
        _positive_seconds("realtime_idle_timeout"),
        default=300.0,
    )

    def __attrs_post_init__(self) -> None:
        if self.uds is not None and self.fd is not None:
            raise InvalidConfigError(f"fd must not be given beside uds, got {self.fd}.", field="fd")
        if self.ssl_certfile is None:
            for field in ("ssl_keyfile", "ssl_ca_certs", "http2"):
                if value := getattr(self, field):
                    raise InvalidConfigError(f"{field} needs ssl_certfile, got {value!r}.", field=field)
        if self.lora_directories and not self.enable_lora_updates:
            raise fail("lora_directories", list(self.lora_directories), "empty without enable_lora_updates")
        if self.enable_lora_updates and not self.lora_directories:
            raise InvalidConfigError(
                "enable_lora_updates needs lora_directories: clients may load adapters from there only "
                "(from anywhere: /), got none.",
                field="enable_lora_updates",
            )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise InvalidConfigError(
                "allow_credentials must be false if allowed_origins is *, got True.",
                field="allow_credentials",
            )
