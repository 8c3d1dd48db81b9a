"""Flags made from the config's fields, and what a mistake is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from evensong.config.resolve import resolve
from evensong.config.sections import ENGINE_SECTIONS, ServerConfig
from evensong.entrypoints.cli import serve_command
from evensong.entrypoints.cli.bench import throughput
from evensong.entrypoints.cli.flags import USAGE, section_values


def parse(*words: str) -> dict[str, Any]:
    options = serve_command.make_parser().parse_args(words)
    values: dict[str, Any] = {}
    for section in (ServerConfig, *ENGINE_SECTIONS.values()):
        values |= section_values(options, section)
    return values


def test_without_flags_the_config_has_its_defaults() -> None:
    values = parse()
    server = {name: values.pop(name) for name in [f.name for f in dataclasses.fields(ServerConfig)] if name in values}
    assert ServerConfig(**server) == ServerConfig()
    assert resolve(values) == resolve({})


def test_every_field_has_a_flag_with_help() -> None:
    text = serve_command.make_parser().format_help()
    for section in (ServerConfig, *ENGINE_SECTIONS.values()):
        for field in dataclasses.fields(section):
            if field.name != "model":
                assert f"--{field.name.replace('_', '-')}" in text
    assert "None" not in text and "==SUPPRESS==" not in text


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("--max-model-len", "512"), "max_model_len", 512),
        (("--max-model-len", "auto"), "max_model_len", "auto"),
        (("--max-model-len=512",), "max_model_len", 512),
        (("--no-enable-prefix-caching",), "enable_prefix_caching", False),
        (("--enable-prefix-caching",), "enable_prefix_caching", True),
        (("--num-gpu-blocks-override", "9"), "num_kv_blocks_override", 9),
        (("--num-kv-blocks-override", "9"), "num_kv_blocks_override", 9),
        (("--shutdown-timeout", "1.5"), "shutdown_timeout", 1.5),
        (("--dtype", "float32"), "dtype", "float32"),
        (("--api-key", "k"), "api_key", ("k",)),
        (("--api-key", "k,l", "--api-key", "m"), "api_key", ("k", "l", "m")),
        (("--allowed-origins", '["http://a", "http://b"]'), "allowed_origins", ("http://a", "http://b")),
        (("--allowed-methods", "GET, POST"), "allowed_methods", ("GET", "POST")),
        ((), "allowed_methods", ("*",)),
        (("--override-generation-config", '{"top_k": 3}'), "override_generation_config", {"top_k": 3}),
        (("--generation-config", "vllm"), "generation_config", "vllm"),
        (("some/folder",), "model", "some/folder"),
    ],
)
def test_flags(words: tuple[str, ...], name: str, value: Any) -> None:
    assert parse(*words)[name] == value


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("demo", "--max-model-length", "5"), "there is no flag --max-model-length; did you mean --max-model-len?"),
        (("demo", "--speculative-config", "2"), "there is no flag --speculative-config\n"),
        (("demo", "--enable-prefix-cachin"), "did you mean --enable-prefix-caching?"),
        (("demo", "--xyzzy=1"), "there is no flag --xyzzy"),
        (("demo", "--max-num", "5"), "there is no flag --max-num"),
        (("demo", "other"), "unexpected argument 'other'"),
        (("--port", "abc"), "--port: invalid integer value: 'abc'"),
        (("--max-model-len", "long"), "--max-model-len: invalid integer value: 'long'"),
        (("--shutdown-timeout", "soon"), "invalid number value"),
        (("--dtype", "int3"), "invalid choice: 'int3'"),
        (("--override-generation-config", "[1]"), "invalid JSON object value: '[1]'"),
        (("--override-generation-config", "{"), "invalid JSON object value"),
        (("--port",), "expected one argument"),
    ],
)
def test_mistakes_get_one_line(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == USAGE
    said = capsys.readouterr().err
    assert said.startswith("evensong serve: ") and says in said and said.count("\n") == 1


def test_the_benchmark_has_the_engines_flags() -> None:
    words = ["--model", "m", "--num-prompts", "3", "--input-len", "4", "--random-output-len", "5", "--block-size", "32"]
    options = throughput.make_parser().parse_args(words)
    assert (options.model, options.num_prompts, options.input_len, options.output_len) == ("m", 3, 4, 5)
    assert options.block_size == 32
