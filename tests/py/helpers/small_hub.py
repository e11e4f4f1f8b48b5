"""A hub of models on this machine, as far as huggingface_hub asks it for lists and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from helpers.stub_http_server import served

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class SmallHub:
    repository: str
    folder: Path
    url: str = ""
    fetched: list[str] = field(default_factory=list)
    """Names of the files whose contents were asked for."""

    @property
    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


class _Handler(BaseHTTPRequestHandler):
    hub: SmallHub

    def do_GET(self) -> None:
        path, repository = self.path.partition("?")[0].lstrip("/"), self.hub.repository
        if path.startswith(f"{repository}/resolve/"):
            self._file(path.split("/", 4)[4])
        elif path.startswith(f"api/models/{repository}/tree/"):
            self._json([self._entry(file) for file in self.hub.files])
        elif path.startswith(f"api/models/{repository}"):
            names = [{"rfilename": self._entry(file)["path"]} for file in self.hub.files]
            self._json({"id": repository, "sha": COMMIT, "siblings": names})
        else:
            self._json({"error": "Repository not found"}, 404, "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815  the names that http.server wants

    def _entry(self, path: Path) -> dict[str, object]:
        name, content = str(path.relative_to(self.hub.folder)), path.read_bytes()
        sha = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": sha}

    def _file(self, name: str) -> None:
        if not (self.hub.folder / name).is_file():
            return self._json({"error": "Entry not found"}, 404, "EntryNotFound")
        content = (self.hub.folder / name).read_bytes()
        if self.command == "GET":
            self.hub.fetched.append(name)
        return self._send(content, 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _json(self, value: object, status: int = 200, error: str = "") -> None:
        more = {"X-Error-Code": error} if error else {}
        self._send(json.dumps(value).encode(), status, more)

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        common = {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT}
        for name, value in (common | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def small_hub(repository: str, folder: Path) -> Iterator[SmallHub]:
    """With one repository, of the files in `folder`."""
    hub = SmallHub(repository, folder)
    with served(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub
