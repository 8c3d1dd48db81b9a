"""Models by their name on a hub: `org/name`, `org/name:file.gguf`, `org/name:Q4_K_M`.

Only configuration, tokenizer and weights are fetched, into the hub library's own cache (HF_HOME, HF_HUB_CACHE), and no
code among them is ever run. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean elsewhere. The hub's library
is imported where it is used: nobody else's start pays for it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from evensong.protocol.errors import ConfigError
from evensong.sources.values import read_json

logger = logging.getLogger(__name__)

DEFAULT_REVISION = "main"
# Looking a model up takes at most so long where nobody answers.
LOOKUP_SECONDS = 5.0
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w./-]+))?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)
_NEEDED = ("config.json", "tokenizer.json")
_OPTIONAL = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class HubName:
    """A model on a hub. `file`: a .gguf file of it, or the quantisation in such a file's name."""

    repo: str
    file: str | None
    revision: str

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}:{self.file}"


def parse_hub_name(model: str, revision: str | None) -> HubName | None:
    """MODEL as a hub name, or None where it cannot be one. Raises ConfigError for a revision that cannot be one."""
    match = _NAME.fullmatch(model)
    if match is None or ".." in model or len(match[1]) > 96:
        return None
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"revision {revision!r:.80} is not a branch, a tag or a commit")
    return HubName(match[1], match[2], revision or DEFAULT_REVISION)


def fetch_from_hub(name: HubName) -> Path:
    """The model's folder or .gguf file in the hub's cache, brought up to date first where the hub can be reached.

    Raises ConfigError in one line when it cannot be had.
    """
    from huggingface_hub import HfApi, constants, errors  # noqa: PLC0415 - see above

    if constants.is_offline_mode():
        return find_in_cache(name, "HF_HUB_OFFLINE is set")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        info = HfApi().model_info(name.repo, revision=name.revision, timeout=LOOKUP_SECONDS)
        return _download(name, [sibling.rfilename for sibling in info.siblings or []])
    except ConfigError:
        raise
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"the model {name} is only for those who accepted its terms on the hub: do so, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"no model {str(name)!r}: there is no such folder or .gguf file here, and the hub has no such model "
            "(or shows it to others only: HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"the model {name} has no revision {name.revision!r} on the hub") from error
    except Exception as error:  # the library raises its network library's own errors, and others, for what fails
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:200] or type(cause).__name__
        path = find_in_cache(name, f"the hub cannot be used: {reason}")
        logger.warning("the hub cannot be used (%s); %s is taken from the cache", reason, name)
        return path


def find_in_cache(name: HubName, why_not_fetched: str) -> Path:
    """What an earlier fetch left of the model. Raises ConfigError where that is not all of it."""
    folder = _snapshot(name)
    if folder is None:
        raise ConfigError(
            f"no model {str(name)!r}: there is no such folder or .gguf file here, and none in the hub's cache "
            f"({why_not_fetched})"
        )
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    try:
        if name.file is not None:
            return folder / _gguf_file(name, names)
        wanted = _folder_files(name, names)
    except ConfigError as error:  # what it says is true of the cache, and may not be of the hub
        raise ConfigError(f"the hub's cache holds only a part of {name} ({why_not_fetched})") from error
    if _INDEX in wanted:
        wanted += _shards(folder / _INDEX)
    missing = [file for file in wanted if file not in names]
    if missing:
        raise ConfigError(f"the hub's cache holds only a part of {name}: {missing[0]} is missing ({why_not_fetched})")
    return folder


def _snapshot(name: HubName) -> Path | None:
    """The folder of the revision in the hub's cache (its layout is documented by the hub's library)."""
    from huggingface_hub import constants  # noqa: PLC0415 - see above

    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    try:
        commit = (cache / "refs" / name.revision).read_text().strip()
    except OSError:
        commit = name.revision
    folder = cache / "snapshots" / commit
    return folder if folder.is_dir() else None


def _download(name: HubName, names: list[str]) -> Path:
    """Fetches what is missing of the files, one after another, so that a signal ends it at once."""
    if name.file is not None:
        return _fetch(name, _gguf_file(name, names))
    wanted = _folder_files(name, names)
    folders = set()
    if _INDEX in wanted:
        wanted += _shards(_fetch(name, _INDEX))
    for file in wanted:
        folders.add(_fetch(name, file).parent)
    if len(folders) != 1:
        raise ConfigError(f"the model {name} changed on the hub while it was fetched; start again")
    return folders.pop()


def _fetch(name: HubName, file: str) -> Path:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - see above

    return Path(hf_hub_download(name.repo, file, revision=name.revision, etag_timeout=LOOKUP_SECONDS))


def _folder_files(name: HubName, names: list[str]) -> list[str]:
    """What is fetched of a model in safetensors; where there is an index, the files that it names are still to add."""
    weights = [file for file in names if file.endswith(".safetensors") and "/" not in file]
    if not weights:
        if any(file.endswith(".gguf") for file in names):
            choices = ", ".join(sorted(file for file in names if file.endswith(".gguf")))
            raise ConfigError(f"the model {name} has several forms; name one, as in {name}:FILE: {choices:.400}")
        raise ConfigError(f"the model {name} on the hub has neither .safetensors nor .gguf files")
    for needed in _NEEDED:
        if needed not in names:
            raise ConfigError(f"the model {name} on the hub has no {needed}")
    if _INDEX in names:
        weights = [_INDEX]
    elif "model.safetensors" in weights:
        weights = ["model.safetensors"]
    return [*_NEEDED, *(file for file in _OPTIONAL if file in names), *weights]


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is damaged: {error!r}") from error
    if not all(isinstance(shard, str) and "/" not in shard for shard in shards):
        raise ConfigError(f"{index} names files outside the folder")
    return shards


def _gguf_file(name: HubName, names: list[str]) -> str:
    """The file that is named, or the one whose name says the quantisation that is."""
    wanted = name.file or ""
    if wanted in names and wanted.endswith(".gguf"):
        return wanted
    files = sorted(file for file in names if file.endswith(".gguf"))
    says = re.compile(rf"(^|[-./]){re.escape(wanted)}([-./]|$)", re.IGNORECASE)
    found = [file for file in files if says.search(file.removesuffix(".gguf")) and "mmproj" not in file]
    if len(found) == 1 and not _PART.search(found[0]):
        return found[0]
    if any(_PART.search(file) for file in found):
        raise ConfigError(f"the model {name} is split into parts on the hub; fetch and join them first")
    what = f"several files for {wanted!r}" if found else f"no file for {wanted!r}"
    raise ConfigError(f"the model {name.repo} has {what}; its .gguf files: {', '.join(files) or 'none':.400}")
