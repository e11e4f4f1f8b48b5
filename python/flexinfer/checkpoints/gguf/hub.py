"""GGUF files of a hub's repository, by the name that other servers take: USER/REPOSITORY:Q4_K_M.

What follows the colon is a file's type, as its name says it, or the file's whole name.
"""

from __future__ import annotations

import glob
import os
import re
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING

from flexinfer.checkpoints.gguf.checkpoint import ENDING, is_gguf
from flexinfer.checkpoints.gguf.header import PART
from flexinfer.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

OF_A_HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*):([\w./-]+)")
PROJECTOR = "mmproj"
"""In the names of files that encode images."""
SECONDS_TO_ANSWER = 20


def gguf_file(name: str) -> str | None:
    """Where the GGUF file of this name lies, of several the first part; None: it names none. A
    hub's is fetched where the cache has it not. Raises UnsupportedModelError for one that cannot be
    had."""
    found = OF_A_HUB.fullmatch(name)
    if found is not None and not os.path.exists(name):
        return _fetched(found[1], found[2])
    return name if is_gguf(name) else None


def files_hint(repository: str) -> str:
    """What to say of a repository that cannot be served by its name alone, if it has such files. Of
    what is here no hub is asked: it may have another of the same name."""
    if os.path.exists(repository):
        return ""
    try:
        names, _ = _files(repository)
    except Exception:  # of any kind: there is another error at hand
        return ""
    return f"; it has GGUF files: name one, as {repository}:{_types(names)[0]}" if names else ""


@cache
def _fetched(repository: str, wanted: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    name = f"{repository}:{wanted}"
    try:
        names, folder = _files(repository)
        names = _chosen(repository, wanted, names)
        if folder is None:
            patterns = [glob.escape(name) for name in names]
            folder = snapshot_download(repository, allow_patterns=patterns)
    except RepositoryNotFoundError as error:
        raise UnsupportedModelError(
            f"model {name!r} cannot be fetched: the hub has no such repository, or you may not "
            "read it (`hf auth login`)"
        ) from error
    except Exception as error:  # of any kind: those of the network have no class in common
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise UnsupportedModelError(f"model {name!r} cannot be fetched: {reason}") from error
    return os.path.join(folder, names[0])


def _files(repository: str) -> tuple[list[str], str | None]:
    """Names of its GGUF files of models; where the hub cannot be reached, those in the cache, and
    in which folder they are."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    folder = None
    try:
        # Not list_repo_files, which asks again for half a minute where there is no network.
        found = HfApi().model_info(repository, timeout=SECONDS_TO_ANSWER).siblings or []
        names = [file.rfilename for file in found]
    except (RepositoryNotFoundError, ValueError):
        raise
    except Exception as error:  # as above
        try:
            # Wanting none of its files: else all of them have to be there.
            folder = snapshot_download(repository, local_files_only=True, allow_patterns=[])
        except LocalEntryNotFoundError:
            raise error from None
        names = glob.glob("**/*", root_dir=folder, recursive=True)
    is_model = [n.lower().endswith(ENDING) and PROJECTOR not in n.lower() for n in names]
    return sorted(compress(names, is_model)), folder


def _chosen(repository: str, wanted: str, names: Sequence[str]) -> list[str]:
    """The parts of the one model that is wanted. Raises ValueError for none and for several."""
    models: dict[str, list[str]] = {}
    for name in names:
        models.setdefault(_without_part(name), []).append(name)
    found = [
        parts
        for model, parts in models.items()
        if wanted in parts or _type_of(model).lower() == wanted.lower()
    ]
    if not found:
        known = f"there are {', '.join(_types(names))}" if names else "there is none at all"
        raise ValueError(f"{repository!r} has no GGUF file of the name {wanted!r}; {known}")
    if len(found) > 1:
        raise ValueError(
            f"{repository!r} has several GGUF files of the name {wanted!r}; take one of "
            f"{', '.join(parts[0] for parts in found)}"
        )
    return found[0]


def _types(names: Sequence[str]) -> list[str]:
    """What can follow the colon, each once."""
    return list(dict.fromkeys(_type_of(_without_part(name)) for name in names))


def _type_of(model: str) -> str:
    """With what a name ends: Q4_K_M of MODEL-Q4_K_M and MODEL.Q4_K_M, but UD-Q4_K_M as a whole."""
    found = re.search(r"(?:^|[-./])((?:UD-)?[A-Za-z]+[0-9]+\w*)$", model)
    return model if found is None else found[1]


def _without_part(name: str) -> str:
    """Without the ending, too."""
    part = PART.fullmatch(name)
    return name[: -len(ENDING)] if part is None else part[1]
