"""A W&B backend on loopback that a real client completes a run against, and a reader of what a client left on disk."""

from __future__ import annotations

import json
import re
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

# refuse: nothing listens (hangs up, once it has listened); stall: takes the request and never answers.
Mode = Literal["accept", "refuse", "stall", "limit", "error"]
API_KEY = "f" * 40  # what the client takes for a well-formed key
ENTITY = "somebody"
_OPERATION = re.compile(r"\b(?:query|mutation)\s+(\w+)")


@dataclass
class Alert:
    """A message that the run sent to its owner."""

    title: str
    text: str
    level: str


@dataclass
class Run:
    """What the backend knows of one run; `resumes` counts the clients that found it there and went on with it."""

    name: str
    project: str
    display_name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    resumes: int = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """The logged rows in the order of their line numbers."""
        return [self.lines[number] for number in sorted(self.lines)]

    def bucket(self) -> dict[str, Any]:
        """The run as the client asks for it, to create or to resume it."""
        tail = self.history[-1:]
        return {
            "id": f"id-{self.name}",
            "name": self.name,
            "displayName": self.display_name,
            "config": json.dumps(self.config),
            "summaryMetrics": json.dumps(self.summary),
            "historyLineCount": len(self.lines),
            "historyTail": json.dumps([json.dumps(row) for row in tail]),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "tags": [],
            "project": _project(self.project),
            "wandbConfig": json.dumps({"t": 1}) if tail else None,
        }

    def take(self, body: dict[str, Any]) -> None:
        """Add one file_stream request: rows by line number, the summary whole, the exit code last."""
        files = body.get("files") or {}
        rows = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        for number, line in enumerate(rows["content"], start=rows["offset"]):
            self.lines[number] = json.loads(line)
        for line in files.get("wandb-summary.json", {"content": []})["content"]:
            self.summary = json.loads(line)
        if body.get("complete"):
            self.exit_code = body["exitcode"]


class FakeWandb:
    """The backend as a context manager: `url` for WANDB_BASE_URL, `runs` by id, `mode` to be changed at any time."""

    def __init__(self, mode: Mode = "accept", retry_after: int = 1) -> None:
        self.runs: dict[str, Run] = {}
        self.operations: list[str] = []  # GraphQL operations, and "file_stream" and "upload", in order of arrival
        self.bodies: list[bytes] = []  # everything that was sent: a test can look for what must not be there
        self.artifacts: list[str] = []  # names of logged tables
        self.retry_after = retry_after
        self.lock = threading.RLock()
        self._mode = mode
        self._changed = threading.Event()
        self._server = _Server(self)
        self._server.server_bind()  # a port that is bound and does not listen refuses connections
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes a client use this backend, and no other host besides."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": API_KEY,
            "WANDB_MODE": "online",
            "WANDB_ERROR_REPORTING": "false",  # the client reports its own errors to its makers
        }

    @property
    def mode(self) -> Mode:
        """How the next request is answered; a change hangs up on the stalled ones."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        with self.lock:
            self._mode = mode
            self._changed.set()
            self._changed = threading.Event()
            if mode != "refuse":
                self._listen()

    def __enter__(self) -> FakeWandb:
        self.mode = self._mode
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.mode = "refuse"  # connections that are kept alive end as well
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _listen(self) -> None:
        if self._thread is None:
            self._server.server_activate()
            self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
            self._thread.start()

    def current(self) -> tuple[Mode, threading.Event]:
        """The mode, and what is set as soon as it is no longer the mode."""
        with self.lock:
            return self._mode, self._changed

    def run(self, variables: dict[str, Any]) -> Run:
        """The run that a GraphQL request is about, created when it is new."""
        name = variables.get("name") or variables.get("runName") or variables["run"]
        project = variables.get("project") or variables.get("projectName") or "uncategorized"
        return self.runs.setdefault(name, Run(name, project))

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of one GraphQL answer; an operation that is not known here is answered with nothing."""
        match operation:
            case "Viewer":
                viewer = {"id": "1", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
                return {"viewer": viewer | {"teams": {"edges": []}}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "RunResumeStatus":
                return {"model": _project(variables["project"]) | {"bucket": self._resume(variables["name"])}}
            case "UpsertBucket":
                return {"upsertBucket": self._upsert(variables)}
            case "NotifyScriptableRunAlert":
                alert = Alert(variables["title"], variables["text"], variables["severity"])
                self.run(variables).alerts.append(alert)
                return {"notifyScriptableRunAlert": {"success": True}}
            case "CreateRunFiles":
                at = f"{self.url}/upload/{variables['run']}"
                files = [{"name": name, "uploadUrl": f"{at}/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
            case "ArtifactType":
                return {"project": {"artifact": None}}
            case "CreateArtifact":  # a table; as committed it needs no upload beyond the run's own file
                self.artifacts.append(variables["input"]["artifactCollectionName"])
                return {"createArtifact": {"artifact": {"id": "1", "state": "COMMITTED", "artifactSequence": {}}}}
        return {}

    def _resume(self, name: str) -> dict[str, Any] | None:
        if name not in self.runs:
            return None
        self.runs[name].resumes += 1
        return self.runs[name].bucket()

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        inserted = variables["name"] not in self.runs
        run = self.run(variables)
        run.display_name = variables["displayName"] or run.display_name or run.name
        run.config.update(json.loads(variables["config"] or "{}"))
        return {"bucket": run.bucket(), "inserted": inserted}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a stalled request ends with its client

    def __init__(self, backend: FakeWandb) -> None:
        self.backend = backend
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Keep the output of the tests clean."""

    def do_POST(self) -> None:
        self._respond()

    def do_PUT(self) -> None:
        self._respond()

    def _respond(self) -> None:
        backend = self.server.backend
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        mode, changed = backend.current()
        if mode == "stall":
            changed.wait()
            self.close_connection = True
        elif mode == "refuse":
            self.close_connection = True
        elif mode == "limit":
            self._send(429, {"error": "rate limit exceeded"}, {"Retry-After": str(backend.retry_after)})
        elif mode == "error":
            self._send(500, {"error": "internal error"})
        else:
            with backend.lock:
                backend.bodies.append(body)
                answer = self._accept(backend, body)
            self._send(200, answer)

    def _accept(self, backend: FakeWandb, body: bytes) -> dict[str, Any]:
        path = self.path.split("?")[0].strip("/").split("/")
        if path[0] == "graphql":
            request = json.loads(body)
            found = _OPERATION.search(request["query"])
            assert found, request
            backend.operations.append(found[1])
            return {"data": backend.answer(found[1], request.get("variables") or {})}
        if path[-1] == "file_stream":
            backend.operations.append("file_stream")
            backend.runs[path[-2]].take(json.loads(body))
        else:
            backend.operations.append("upload")
            backend.runs[path[1]].files["/".join(path[2:])] = body
        return {}

    def _send(self, status: int, answer: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _project(name: str) -> dict[str, Any]:
    return {"id": f"id-{name}", "name": name, "entity": {"id": f"id-{ENTITY}", "name": ENTITY}}


@dataclass
class Offline:
    """What one `.wandb` file holds; a file that was cut off is read up to the cut, and `exit_code` is then None."""

    run_id: str = ""
    project: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    exit_code: int | None = None

    def take(self, record: Any) -> None:
        """Add one record of the client."""
        kind = record.WhichOneof("record_type")
        if kind == "run":
            self.run_id, self.project = record.run.run_id, record.run.project
            _update(self.config, record.run.config.update)
        elif kind == "config":
            _update(self.config, record.config.update)
        elif kind == "summary":
            _update(self.summary, record.summary.update)
        elif kind == "history":
            self.rows.append({})
            _update(self.rows[-1], record.history.item)
        elif kind == "alert":
            self.alerts.append(Alert(record.alert.title, record.alert.text, record.alert.level))
        elif kind == "exit":
            self.exit_code = record.exit.exit_code


def read_offline(path: Path) -> Offline:
    """Read the `.wandb` file of a run directory, or the file itself."""
    from wandb.proto import wandb_internal_pb2

    found = Offline()
    for message in _messages(path if path.is_file() else next(path.glob("*.wandb"))):
        found.take(wandb_internal_pb2.Record.FromString(message))  # type: ignore[attr-defined]
    return found


def _messages(path: Path) -> Iterator[bytes]:
    """The messages of a LevelDB log: blocks of 32 KiB, each a series of (checksum, length, type) and a fragment."""
    data = path.read_bytes()
    at, parts = 7, b""  # the file begins with seven bytes of its own
    while at + 7 <= len(data):
        room = 0x8000 - at % 0x8000
        if room < 7:  # too small for a header: padding
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        fragment = data[at + 7 : at + 7 + length]
        if kind == 0 or len(fragment) < length:  # the cut
            return
        at += 7 + length
        parts = fragment if kind in (1, 2) else parts + fragment
        if kind in (1, 4):
            yield parts


def _update(values: dict[str, Any], items: Any) -> None:
    for item in items:
        values[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
