"""A hub's repositories by their ids: whether the hub can be asked, and which revision is meant.

transformers asks for each file anew, and for half a minute where there is no network. So the hub is
asked once, before all else; where it does not answer, its files are those in the cache.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flexinfer.checkpoints.folder import WEIGHTS_ENDING
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.model_config import resolve_config

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig

logger = logging.getLogger(__name__)

SECONDS_TO_ANSWER = 10
OFFLINE = "HF_HUB_OFFLINE"
SETTINGS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
FILE_ENDINGS = (".gguf", WEIGHTS_ENDING)
"""What ends so is meant to be a file here, if one that is not there."""
NOT_READ = ["*/*", "consolidated*"]
"""Weights in another form, or of another program."""


def is_hub_id(name: Any) -> bool:
    """Whether it can be one; a GGUF file of a hub (USER/REPOSITORY:TYPE) is fetched by itself."""
    if not isinstance(name, str) or ":" in name or os.path.exists(name):
        return False
    if name.lower().endswith(FILE_ENDINGS):
        return False
    return name.count("/") < 2 and not name.startswith((".", "~", "/"))


@contextmanager
def asking_if_it_answers(names: Iterable[Any]) -> Iterator[None]:
    """Within it the hub is held to be offline if it does not answer now. Raises
    UnsupportedModelError if it does not, and the cache has not all of these."""
    from huggingface_hub import constants

    ids = [name for name in names if is_hub_id(name)]
    reason = _why_no_answer(ids[0]) if ids else None
    if reason is None:
        yield
        return
    for name in ids:
        if not _is_cached(name):
            raise UnsupportedModelError(
                f"model {name!r} is neither a folder nor in the cache, and the hub "
                f"({constants.ENDPOINT}) does not answer: {reason}; check the path, or the network"
            )
    logger.warning("the hub does not answer (%s): %s as in the cache", reason, ", ".join(ids))
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    of_ranks = os.environ.get(OFFLINE)
    os.environ[OFFLINE] = "1"
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        os.environ.pop(OFFLINE, None)
        if of_ranks is not None:
            os.environ[OFFLINE] = of_ranks


def _why_no_answer(repository: str) -> str | None:
    """None: it answers, if only that there is no such repository, or is not to be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().model_info(repository, timeout=SECONDS_TO_ANSWER)
    except (HfHubHTTPError, OfflineModeIsEnabled, ValueError):
        return None
    except Exception as error:  # of any kind: those of the network have no class in common
        return next(iter(str(error).strip().splitlines()), repr(error))
    return None


def _is_cached(repository: str) -> bool:
    from huggingface_hub import snapshot_download

    try:  # wanting none of its files: else all of them have to be there
        snapshot_download(repository, local_files_only=True, allow_patterns=[])
    except (OSError, ValueError):
        return False
    return True


def at_revision(config: EngineConfig) -> EngineConfig:
    """With folders in the place of hub ids, where the config says which revision, where to keep it
    or by whose right. Raises ValueError for a revision of something else, UnsupportedModelError for
    one that cannot be had or served."""
    names = ("revision", "tokenizer_revision", "download_dir", "hf_token")
    if not any(getattr(config, name) for name in names):
        return config
    hub = _Hub(config.download_dir, config.hf_token)
    model, tokenizer = config.model, config.tokenizer
    revision = config.tokenizer_revision
    if tokenizer is None and (revision or is_hub_id(model)):
        tokenizer, revision = model, revision or config.revision
    _check_has_revisions(model, config.revision, "revision")
    _check_has_revisions(tokenizer, config.tokenizer_revision, "tokenizer_revision")
    if is_hub_id(model):
        folder = hub.fetch(model, config.revision, SETTINGS)
        resolve_config(folder, config.overrides)  # what is refused is not fetched
        if config.load_format != "dummy":
            hub.fetch(model, config.revision, WEIGHTS)
        model = folder
    if is_hub_id(tokenizer):
        tokenizer = hub.fetch(tokenizer, revision, SETTINGS)
    return replace(config, model=model, tokenizer=tokenizer, revision=None, tokenizer_revision=None)


def _check_has_revisions(name: Any, revision: str | None, option: str) -> None:
    if revision is not None and not is_hub_id(name):
        what = name if isinstance(name, (str, os.PathLike)) else type(name).__name__
        raise ValueError(
            f"{option}={revision!r} is of a repository of the hub, and {what!r} is none: leave it "
            "out"
        )


@dataclass(frozen=True, slots=True)
class _Hub:
    folder: str | os.PathLike[str] | None
    token: str | bool | None

    def fetch(self, repository: str, revision: str | None, patterns: list[str]) -> str:
        """The folder with at least these files."""
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(
                repository,
                revision=revision,
                cache_dir=None if self.folder is None else os.fspath(self.folder),
                token=self.token,
                allow_patterns=patterns,
                ignore_patterns=NOT_READ,
            )
        except Exception as error:  # as above
            which = repository if revision is None else f"{repository} at revision {revision!r}"
            reason = next(iter(str(error).strip().splitlines()), repr(error))
            raise UnsupportedModelError(f"{which} cannot be fetched: {reason}") from error
