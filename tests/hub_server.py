"""A small Hub on this machine, as huggingface_hub speaks to it: repositories, branches, LFS uploads, commits, files."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
import hashlib
import json
import logging
from threading import Thread
from typing import Any

from flask import Flask, Response, request
from werkzeug.serving import make_server

TOKEN = "hf_secretsecretsecretsecretsecretsecret"
_LARGE = 2000
"""Bytes from which a file goes to LFS."""


class Hub:
    """Files of every branch of every repository, and what was asked. `fail`: path and status of requests that fail."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.commits = 0
        self.fail: dict[str, int] = {}
        self.url = ""

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        return self.repos[repo][branch]


def _error(status: int, code: str = "", text: str = "no") -> Response:
    return Response(json.dumps({"error": text}), status, {"X-Error-Code": code, "X-Error-Message": text})


def _entries(files: dict[str, bytes], below: str) -> list[dict[str, Any]]:
    """What lies directly in a folder."""
    start, found = f"{below}/" if below else "", dict[str, dict[str, Any]]()
    for path, content in files.items():
        if path.startswith(start):
            name, slash, _ = path.removeprefix(start).partition("/")
            entry = _file(path, content)
            found[name] = entry | {"type": "directory", "path": start + name, "size": 0} if slash else entry
    return list(found.values())


def _file(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _app(hub: Hub) -> Flask:
    app = Flask("hub")
    repo = "/<org>/<name>"

    @app.before_request
    def _first() -> Response | None:
        hub.asked.append(f"{request.method} {request.path}")
        for part, status in hub.fail.items():
            if part in f"{request.method} {request.path}":
                return _error(status, text="not today")
        writes = request.method in ("POST", "PUT") and "paths-info" not in request.path and "/lfs/" not in request.path
        if writes and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, text="Invalid username or password.")
        return None

    def branch_of(org: str, name: str, revision: str) -> dict[str, bytes] | Response:
        branches = hub.repos.get(f"{org}/{name}")
        if branches is None:
            return _error(404, "RepoNotFound")
        found = branches.get(revision)
        return _error(404, "RevisionNotFound") if found is None else found

    @app.post("/api/repos/create")
    def _create() -> Any:
        asked = request.get_json()
        known = f"{asked['organization']}/{asked['name']}"
        if known in hub.repos:
            return {"error": "You already created this model repo", "url": f"{hub.url}/{known}"}, 409
        hub.repos[known] = {"main": {}}
        return {"url": f"{hub.url}/{known}"}

    @app.post("/api/validate-yaml")
    def _card() -> Any:
        return {"errors": [], "warnings": []}

    @app.post(f"/api/models{repo}/branch/<branch>")
    def _branch(org: str, name: str, branch: str) -> Any:
        branches = hub.repos[f"{org}/{name}"]
        if branch in branches:
            return _error(409)
        branches[branch] = dict(branches["main"])
        return {}

    @app.get(f"/api/models{repo}")
    @app.get(f"/api/models{repo}/revision/<revision>")
    def _info(org: str, name: str, revision: str = "main") -> Any:
        found = branch_of(org, name, revision)
        if isinstance(found, Response):
            return found
        siblings = [{"rfilename": path, "size": len(content)} for path, content in found.items()]
        return {"_id": "1", "id": f"{org}/{name}", "sha": f"{hub.commits:040}", "siblings": siblings, "tags": []}

    @app.get(f"/api/models{repo}/tree/<revision>")
    @app.get(f"/api/models{repo}/tree/<revision>/<path:below>")
    def _tree(org: str, name: str, revision: str, below: str = "") -> Any:
        found = branch_of(org, name, revision)
        if isinstance(found, Response):
            return found
        return _entries(found, below) or (_error(404, "EntryNotFound") if below else [])

    @app.post(f"/api/models{repo}/paths-info/<revision>")
    def _paths(org: str, name: str, revision: str) -> Any:
        found = branch_of(org, name, revision)
        if isinstance(found, Response):
            return found
        return [_file(path, found[path]) for path in request.form.getlist("paths") if path in found]

    @app.post(f"/api/models{repo}/preupload/<revision>")
    def _modes(org: str, name: str, revision: str) -> Any:
        found = branch_of(org, name, revision)
        if isinstance(found, Response):
            return found
        return {
            "files": [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= _LARGE else "regular", "shouldIgnore": False}
                for f in request.get_json()["files"]
            ]
        }

    @app.post(f"{repo}.git/info/lfs/objects/batch")
    def _batch(org: str, name: str) -> Any:
        found = list[dict[str, Any]]()
        for one in request.get_json()["objects"]:
            upload, verify = ({"href": f"{hub.url}/lfs/{last}"} for last in (one["oid"], "verify"))
            known = one["oid"] in hub.objects
            found.append(one if known else one | {"actions": {"upload": upload, "verify": verify}})
        return {"objects": found}

    @app.put("/lfs/<oid>")
    def _put(oid: str) -> Any:
        raw = request.get_data()
        if hashlib.sha256(raw).hexdigest() != oid:
            return _error(400)
        hub.objects[oid] = raw
        return ""

    @app.post("/lfs/verify")
    def _verify() -> Any:
        asked = request.get_json()
        return {} if len(hub.objects.get(asked["oid"], b"")) == asked["size"] else _error(404)

    @app.post(f"/api/models{repo}/commit/<revision>")
    def _commit(org: str, name: str, revision: str) -> Any:
        found = branch_of(org, name, revision)
        if isinstance(found, Response):
            return found
        changed = dict(found)
        for line in request.get_data().splitlines():
            asked = json.loads(line)
            value = asked["value"]
            if asked["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif asked["key"] == "lfsFile":
                changed[value["path"]] = hub.objects[value["oid"]]
            elif asked["key"] == "deletedFile":
                del changed[value["path"]]
        hub.repos[f"{org}/{name}"][revision] = changed
        hub.commits += 1
        oid = f"{hub.commits:040}"
        return {"commitOid": oid, "commitUrl": f"{hub.url}/{org}/{name}/commit/{oid}", "success": True}

    @app.get(f"{repo}/resolve/<revision>/<path:path>")
    def _resolve(org: str, name: str, revision: str, path: str) -> Any:
        found = branch_of(org, name, revision)
        if isinstance(found, Response):
            return found
        if path not in found:
            return _error(404, "EntryNotFound")
        content, headers = found[path], {"ETag": f'"{hashlib.sha1(found[path]).hexdigest()}"'}
        headers["X-Repo-Commit"] = f"{hub.commits:040}"
        asked = request.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if asked[1]:
            first, last = int(asked[0]), int(asked[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return Response(content[first : last + 1], 206, headers)
        return Response(content, 200, headers)

    return app


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A Hub at a free port of this machine."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    hub = Hub()
    server = make_server("127.0.0.1", 0, _app(hub), threaded=True)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
