"""Models by their name on a hub: a hub of our own on loopback, the real client library."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from evensong.protocol.errors import ConfigError
from evensong.sources.hub import parse_hub_name
from evensong.sources.model_config import load_model_description
from evensong.sources.resolve import ModelSource, resolve_model
from evensong.sources.weights import open_weights
from tests.unit.sources.files import tiny_folder, tiny_gguf

COMMIT = "1" * 40
TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """`repos`: name -> file -> bytes. Keeps what was asked of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.hidden: set[str] = set()
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        self.broken_after: int | None = None


class Handler(BaseHTTPRequestHandler):
    """The two routes that fetching needs."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        """A file's headers."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """A repository's list of files, or a file."""
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, revision = "/".join(parts[2:4]), parts[5]
            if self._refused(repo, revision):
                return
            names = [{"rfilename": name} for name in self.server.repos[repo]]
            self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": names}).encode(), body=True)
            return
        if parts[2:3] != ["resolve"] or len(parts) < 5:
            self._send(404, b"")
            return
        repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        if self._refused(repo, revision):
            return
        if self.server.broken_after is not None and len(self.server.fetched) >= self.server.broken_after:
            self._send(418, b"")
            return
        if body:
            self.server.fetched.append(name)
        data = self.server.repos[repo][name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        self._send(200, data, body=body, headers=headers)

    def _refused(self, repo: str, revision: str) -> bool:
        mine = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in self.server.repos or (repo in self.server.hidden and not mine):
            self._send(401, b"", headers={"X-Error-Code": "RepoNotFound"})
        elif repo in self.server.gated and not mine:
            self._send(403, b"", headers={"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", "v2", COMMIT):
            self._send(404, b"", headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _send(self, status: int, data: bytes, *, body: bool = True, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(data)


def point_at(monkeypatch: Any, port: int) -> None:
    """What HF_ENDPOINT does when the library is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    template = "http://127.0.0.1:%d/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template % port)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Any) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        point_at(monkeypatch, server.server_port)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server
        server.shutdown()
        thread.join()


def files_of(source: ModelSource) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in source.path.iterdir()}


@pytest.fixture
def sharded(hub: Hub, tmp_path: Path) -> dict[str, bytes]:
    """A model in three shards, with files beside it that nobody needs."""
    files = files_of(tiny_folder(tmp_path / "made", shards=3))
    extra = {
        "README.md": b"#",
        "modeling_evil.py": b"raise SystemExit",
        "consolidated.safetensors": b"x" * 1000,
        "onnx/model.safetensors": b"x",
        "pytorch_model.bin": b"x",
    }
    hub.repos["org/tiny"] = {**files, **extra}
    return files


@pytest.fixture
def ggufs(hub: Hub, tmp_path: Path) -> bytes:
    data = tiny_gguf(tmp_path / "tiny.gguf").path.read_bytes()
    names = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "F16/tiny-F16.gguf", "mmproj-Q8_0.gguf")
    hub.repos["org/tiny-GGUF"] = {**dict.fromkeys(names, data), "big-Q2_K-00001-of-00002.gguf": data}
    return data


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_what_a_model_needs_is_fetched(hub: Hub, sharded: dict[str, bytes]) -> None:
    source = resolve_model("org/tiny", progress=False)
    assert (source.kind, source.name) == ("folder", "org/tiny")
    assert {path.name: path.read_bytes() for path in source.path.iterdir()} == sharded
    assert load_model_description(source).family == "llama" and len(open_weights(source)) == 20
    count = len(hub.fetched)
    assert resolve_model("org/tiny", progress=False) == source and len(hub.fetched) == count


def test_a_fetched_model_needs_no_hub(hub: Hub, sharded: dict[str, bytes], monkeypatch: Any) -> None:
    source = resolve_model("org/tiny", progress=False)
    tagged = resolve_model("org/tiny", revision="v2", progress=False)
    assert tagged.path == source.path  # one commit
    hub.repos.clear()
    for revision in (None, "main", "v2", COMMIT):
        assert resolve_model("org/tiny", revision=revision, fetched=True) == source
    assert "no such folder" in refusal("org/tiny", revision="v3", fetched=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/tiny") == source
    assert "HF_HUB_OFFLINE" in refusal("org/other")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tiny-Q8_0.gguf", "tiny-Q8_0.gguf"),
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny-Q8_0.gguf"),
        ("F16", "tiny-F16.gguf"),
        ("F16/tiny-F16.gguf", "tiny-F16.gguf"),
    ],
)
def test_gguf_files(hub: Hub, ggufs: bytes, name: str, file: str) -> None:
    source = resolve_model(f"org/tiny-GGUF:{name}", progress=False)
    assert source.kind == "gguf" and source.path.name == file and source.path.read_bytes() == ggufs
    assert len(hub.fetched) == 1
    assert resolve_model(f"org/tiny-GGUF:{name}", fetched=True) == source


def test_which_gguf_file(hub: Hub, ggufs: bytes) -> None:
    assert "name one" in refusal("org/tiny-GGUF") and "tiny-Q8_0.gguf" in refusal("org/tiny-GGUF")
    assert "no file for 'Q4_K'" in refusal("org/tiny-GGUF:Q4_K")
    assert "parts" in refusal("org/tiny-GGUF:Q2_K") and "parts" in refusal("org/tiny-GGUF:big-Q2_K-00001-of-00002")
    assert not hub.fetched


def test_what_lies_here_comes_first(hub: Hub, sharded: dict[str, bytes], tmp_path: Path) -> None:
    tiny_folder(tmp_path / "org" / "tiny")
    assert resolve_model("org/tiny") == ModelSource("folder", Path("org/tiny"), "org/tiny")
    assert not hub.fetched


def test_who_may_have_it(hub: Hub, sharded: dict[str, bytes], monkeypatch: Any) -> None:
    assert "no such model" in refusal("org/none") and "HF_TOKEN" in refusal("org/none")
    assert "no revision 'v3'" in refusal("org/tiny", revision="v3")
    hub.gated.add("org/tiny")
    assert "accepted its terms" in refusal("org/tiny") and not hub.fetched
    hub.gated.clear()
    hub.hidden.add("org/tiny")
    assert "HF_TOKEN" in refusal("org/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve_model("org/tiny").kind == "folder"


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_models_that_are_not_whole_are_not_fetched(hub: Hub, sharded: dict[str, bytes], missing: str) -> None:
    del hub.repos["org/tiny"][missing]
    assert missing in refusal("org/tiny") and not hub.fetched
    hub.repos["org/tiny"] = {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"x"}
    assert "neither .safetensors nor .gguf" in refusal("org/tiny")


def test_a_fetch_that_breaks_off(hub: Hub, sharded: dict[str, bytes]) -> None:
    hub.broken_after = 5
    assert "only a part" in refusal("org/tiny") and "418" in refusal("org/tiny")
    assert "only a part" in refusal("org/tiny", fetched=True)
    hub.broken_after = None
    assert resolve_model("org/tiny").kind == "folder"
    assert sorted(hub.fetched) == sorted(sharded)  # nothing twice


def test_one_file_that_breaks_off(hub: Hub, ggufs: bytes) -> None:
    resolve_model("org/tiny-GGUF:Q8_0")
    hub.broken_after = 0
    message = refusal("org/tiny-GGUF:Q4_K_M")
    assert "only a part" in message and "418" in message
    assert "only a part" in refusal("org/tiny-GGUF:Q4_K_M", fetched=True)


def test_a_hub_that_nobody_answers(hub: Hub, sharded: dict[str, bytes], monkeypatch: Any) -> None:
    source = resolve_model("org/tiny")
    point_at(monkeypatch, 1)
    start = time.monotonic()
    assert "cannot be used" in refusal("org/other")
    assert resolve_model("org/tiny") == source  # as it is in the cache
    assert time.monotonic() - start < 10


def test_an_index_that_names_places_outside(hub: Hub, sharded: dict[str, bytes]) -> None:
    for weight_map in ({"a": "../../x"}, {"a": 1}, 5):
        hub.repos["org/tiny"]["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
        refusal("org/tiny")
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_names() -> None:
    for model in ("Qwen/Qwen3-0.6B", "a/b", "a/b:Q4_K_M", "a/b:x/y.gguf", "01-ai/Yi_1.5"):
        assert parse_hub_name(model, None) is not None
    odd = ("a", "a/b/c", "/a/b", "./a", "../a", "a/..", "a/b:", "a/b:../x", "a b/c", "a/b\n", "a/" + "b" * 200, "ä/b")
    for model in odd:
        assert parse_hub_name(model, None) is None, model
    for revision in ("", "../x", "a b", "a\x00", "-x"):
        with pytest.raises(ConfigError, match="revision"):
            parse_hub_name("a/b", revision)
