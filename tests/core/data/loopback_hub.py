"""A hub on the loopback device, with the API that libraries need to find, list and download datasets and models."""

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass(frozen=True)
class Repository:
    """Commits of a dataset or a model by the names of branches and tags; each commit is the files of its tree."""

    revisions: dict[str, Files]

    def commit(self, revision: str) -> tuple[str, Files] | None:
        """The id and the files of a revision, by a name or by the id."""
        for name, files in self.revisions.items():
            content = json.dumps({path: hashlib.sha1(body).hexdigest() for path, body in sorted(files.items())})
            commit = hashlib.sha1(content.encode()).hexdigest()
            if revision in (name, commit):
                return commit, files
        return None


@dataclass
class Hub:
    """The repositories served.

    Attributes:
        repositories: By name, `owner/name`; a dataset and a model do not have the same name.
        url: Where.
        asked: Every request so far: method and path.
    """

    repositories: dict[str, Repository]
    url: str = ""
    asked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self):
        self._answer()

    def do_HEAD(self):
        self._answer()

    def do_POST(self):
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def log_message(self, *args):
        pass

    def _answer(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        self.hub.asked.append(f"{self.command} {'/'.join(parts)}")
        is_api = parts[0] == "api"
        if is_api or parts[0] == "datasets":
            parts = parts[2:] if is_api else parts[1:]
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._error(401, "RepoNotFound", "Repository not found")
        revision = rest[1] if len(rest) > 1 else "main"
        found = repository.commit(revision)
        if found is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        commit, files = found
        what = rest[0] if rest else "revision"
        if not is_api and what == "resolve":
            return self._file(commit, files, "/".join(rest[2:]))
        answers = {"revision": self._info, "tree": self._tree, "paths-info": self._paths}
        if what not in answers:
            return self._error(404, "EntryNotFound", "no such page")
        return answers[what](name, commit, files, "/".join(rest[2:]))

    def _info(self, name, commit, files, _):
        siblings = [{"rfilename": path} for path in files]
        self._json({"_id": "0", "id": name, "sha": commit, "private": False, "gated": False, "tags": [], "siblings": siblings})

    def _tree(self, name, commit, files, under):
        listed = [self._entry(files, path) for path in files if path.startswith(f"{under}/" if under else "")]
        folders = {path.rpartition("/")[0] for path in files} - {"", under}
        wanted = "recursive=True" in self.path or "recursive=true" in self.path
        if not wanted:
            deep = len(under.split("/")) if under else 0
            listed = [entry for entry in listed if entry["path"].count("/") == deep]
        listed += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        if under and not listed:
            return self._error(404, "EntryNotFound", f"{under} does not exist")
        return self._json(listed)

    def _paths(self, name, commit, files, _):
        body = self._body.decode()
        asked = (
            json.loads(body)["paths"]
            if body.startswith("{")
            else [unquote(p.split("=")[1]) for p in body.split("&") if p.startswith("paths=")]
        )
        folders = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
        found = [self._entry(files, path) for path in asked if path in files]
        self._json(
            found + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in asked if path in folders]
        )

    @staticmethod
    def _entry(files, path):
        return {"type": "file", "path": path, "size": len(files[path]), "oid": hashlib.sha1(files[path]).hexdigest()}

    def _file(self, commit, files, path):
        if path not in files:
            return self._error(404, "EntryNotFound", "Entry not found", commit=commit)
        body = files[path]
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _json(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status, code, message, commit=None):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        body = json.dumps({"error": message}).encode() if self.command != "HEAD" else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(repositories: dict[str, Repository]):
    """A hub that serves the repositories until the block ends."""
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
