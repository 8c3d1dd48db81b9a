"""The settings of an engine, one frozen dataclass a section. Flags are made from these fields.

A field's metadata holds `help` (one line) and, where the flag differs from the field's name, `flags`.
Names are vLLM's where vLLM has the setting.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any, Literal

AUTO: Literal["auto"] = "auto"
# What they are stands in engine/frontend/reasoning.py and entrypoints/http/parsers/formats.py.
REASONING_PARSERS = ("deepseek_r1", "qwen3", "think", "mistral")
TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "json")


def setting(default: Any, help: str, *flags: str, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    """A config field with its default, help line and flag names."""
    return field(default=default, metadata={"help": help, "flags": flags, "choices": choices, "metavar": metavar})


@dataclass(frozen=True)
class ModelConfig:
    """Which model runs, and in which numeric mode."""

    model: str = setting("demo", "a folder, a .gguf file, a name on the hub (org/name, org/name:Q4_K_M), or demo")
    revision: str | None = setting(None, "branch, tag or commit of a model on the hub (default: main)")
    served_model_name: str | None = setting(None, "name in the API (default: MODEL as given)")
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = setting(
        "auto",
        "run dtype; auto takes the checkpoint's; float16 runs as bfloat16 on CPU",
        choices=("auto", "bfloat16", "float32", "float16"),
    )
    max_model_len: int | Literal["auto"] = setting(
        AUTO, "most tokens of prompt plus output; auto: the model's own limit, reduced to what fits", metavar="N|auto"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: cuda if there is one, else cpu", choices=("auto", "cpu", "cuda")
    )
    seed: int | None = setting(
        None, "makes the seeds that requests without one draw the same at every start, in order of arrival"
    )
    enforce_eager: bool = setting(False, "run the model op by op instead of replaying its recorded program; same bytes")
    max_logprobs: int = setting(20, "most logprobs that a request may ask for at each position")
    generation_config: str = setting(
        AUTO,
        "sampling defaults; auto: the model's own generation_config.json; vllm: none; or a folder with such a file",
        metavar="auto|vllm|FOLDER",
    )
    override_generation_config: dict[str, Any] | None = setting(
        None, 'sampling defaults over those, such as {"temperature": 0.5}', metavar="JSON"
    )
    logits_processors: tuple[str, ...] = setting(
        (), "code of your own that changes logits, beside that of installed packages; repeated", metavar="MODULE:CLASS"
    )
    reasoning_parser: str | None = setting(
        None,
        "how the model writes its reasoning, which answers then hold apart (default: they do not)",
        choices=REASONING_PARSERS,
    )


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = setting(16, "tokens in a KV block")
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of shared prefixes")
    num_kv_blocks_override: int | None = setting(
        None,
        "exact number of KV blocks, those of all layer groups together",
        "--num-kv-blocks-override",
        "--num-gpu-blocks-override",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "dtype of the KV cache; auto: that of the run", choices=("auto", "bfloat16", "float32")
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "bytes of each rank's KV cache, taken while the engine is idle (the default's are taken as they are used)",
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """Who runs next, and how much a step may hold."""

    max_num_seqs: int | None = setting(None, "most requests in one step (default: 64 on CPU, 256 on CUDA)")
    max_num_batched_tokens: int | None = setting(
        None, "most tokens in one step (default on CPU: chosen at start so that a step stays under --step-seconds)"
    )
    step_seconds: float = setting(
        0.25, "on CPU: how long others may have to wait for a step (default for LLM: 1, it has no one who waits)"
    )
    enable_chunked_prefill: bool = setting(True, "compute long prompts over several steps")
    long_prefill_token_threshold: int = setting(0, "most tokens of one prompt in a step; 0: no limit of its own")
    max_num_queued_reqs: int = setting(1024, "most requests that wait; beyond it 429")
    max_num_queued_tokens: int | None = setting(
        None, "most tokens of requests that wait; beyond it 429 (default: no limit)"
    )
    scheduling_policy: Literal["priority", "fcfs"] = setting(
        "priority",
        "priority: requests with a lower priority number go first; fcfs: that number is ignored",
        choices=("priority", "fcfs"),
    )
    fair_share: Literal["none", "key", "user"] = setting(
        "none",
        "whom to give equal shares: key: each API key; user: each value of the field user",
        choices=("none", "key", "user"),
    )
    tenant_weights: str | None = setting(
        None, 'shares that are not equal, by name of the key or user: JSON such as {"alice": 2} (others have 1)'
    )
    async_scheduling: bool = setting(True, "plan the next step while one runs; same bytes without")
    request_timeout: float | None = setting(None, "seconds that a request may take in all (default: no limit)")
    queue_timeout: float | None = setting(None, "seconds that a request may wait to begin (default: no limit)")


@dataclass(frozen=True)
class ParallelConfig:
    """How many workers run the model, and what each holds of it."""

    tensor_parallel_size: int = setting(
        1, "workers that share each layer; heads need not divide evenly", "--tensor-parallel-size", "-tp"
    )
    pipeline_parallel_size: int = setting(
        1, "stages, each a range of the layers, in workers of their own", "--pipeline-parallel-size", "-pp"
    )
    pipeline_layers: str | None = setting(
        None, "layers of each stage, such as 18,12 (default: so that stages take as long as each other)", metavar="N,N"
    )
    distributed_executor_backend: Literal["auto", "uni", "mp"] = setting(
        "auto",
        "uni: the worker runs inside the core's process; mp: each in a process of its own; auto: mp for several",
        choices=("auto", "uni", "mp"),
    )
    worker_timeout: float = setting(300.0, "seconds that a step or a call may take on a worker before the engine fails")

    @property
    def num_ranks(self) -> int:
        """Workers of a replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class ObservabilityConfig:
    """Logs and figures."""

    disable_log_stats: bool = setting(False, "no stats line every 10 s while busy")
    use_tqdm_on_load: bool = setting(True, "a progress bar while weights load, where stderr is a terminal")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severe line to log", choices=("debug", "info", "warning", "error")
    )
    log_format: Literal["text", "json"] = setting(
        "text", "lines for people, or one JSON object a line", choices=("text", "json")
    )
    otlp_traces_endpoint: str | None = setting(
        None, "where spans go: the URL of an OpenTelemetry collector (OTLP over HTTP)", metavar="URL"
    )
    torch_profiler_dir: str | None = setting(
        None, "folder for the traces of all ranks, from /start_profile to /stop_profile (default: no profiling)"
    )


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is told; frozen, and the same in every process of a launch."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)


def for_terminal(config: EngineConfig) -> EngineConfig:
    """The config of a core whose stderr is this process's: a progress bar only where a person can see it."""
    bar = config.observability.use_tqdm_on_load and config.observability.log_format == "text"
    bar = bar and sys.stderr is not None and sys.stderr.isatty()
    return replace(config, observability=replace(config.observability, use_tqdm_on_load=bar))


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP front door; only the launcher and the HTTP process see it."""

    host: str = setting("127.0.0.1", "address to listen on (vLLM listens on all interfaces by default)")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = setting(
        (), "key that requests must bear; several: repeated, or with commas (default: $EVENSONG_API_KEY)", metavar="KEY"
    )
    metrics_no_auth: bool = setting(False, "leave /metrics open when a key is set")
    max_request_bytes: int = setting(16 * 1024 * 1024, "largest request body in bytes")
    read_timeout: float = setting(
        60.0, "seconds in which the headers of a request, and then its body, must have come; 0: no limit"
    )
    stall_timeout: float = setting(
        10.0, "seconds without progress, though there is work, after which /health/progress is 503"
    )
    timeout_keep_alive: int = setting(5, "seconds that an idle connection is kept")
    allowed_origins: tuple[str, ...] = setting(
        (), "origins of web pages that may call (CORS), * for any; a JSON list, or with commas", metavar="ORIGINS"
    )
    allowed_methods: tuple[str, ...] = setting(("*",), "methods that such pages may use", metavar="METHODS")
    allowed_headers: tuple[str, ...] = setting(("*",), "headers that such pages may send", metavar="HEADERS")
    allow_credentials: bool = setting(False, "let such pages send cookies and other credentials")
    ssl_certfile: str | None = setting(None, "certificate, with its chain, in PEM: serve HTTPS", metavar="FILE")
    ssl_keyfile: str | None = setting(None, "its private key in PEM (default: in --ssl-certfile)", metavar="FILE")
    ssl_ca_certs: str | None = setting(None, "certificates that vouch for clients', in PEM", metavar="FILE")
    ssl_cert_reqs: int = setting(0, "clients' certificates: 0 not asked for, 1 checked if sent, 2 required")
    root_path: str = setting("", "path under which a proxy shows this server", metavar="PATH")
    disable_fastapi_docs: bool = setting(False, "no /docs and no /openapi.json")
    access_log: bool = setting(False, "a log line for each request", "--access-log")
    max_n: int = setting(128, "most choices (n) that a request may ask for")
    chat_template: str | None = setting(None, "file with a chat template, in place of the model's", metavar="FILE")
    trust_request_chat_template: bool = setting(
        False, "let requests bring a chat_template of their own (it runs in a process of its own, with limits)"
    )
    responses_store_bytes: int = setting(
        128 * 1024 * 1024, "memory for responses of /v1/responses that can be read again; 0 keeps none"
    )
    tool_call_parser: str | None = setting(
        None, "how the model writes calls of tools (default: by its chat template)", choices=TOOL_PARSERS
    )
    enable_auto_tool_choice: bool = setting(
        True, "take tools with tool_choice auto; with --no-enable-auto-tool-choice they are refused"
    )
    shutdown_timeout: float = setting(30.0, "seconds that running requests get after SIGTERM or Ctrl-C")


ENGINE_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "observability": ObservabilityConfig,
}
