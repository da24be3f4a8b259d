"""A stand-in for an SGLang 0.5.23 server: the same paths, fields, status codes and traps, without a model.

Invariant: every token carries the version that was loaded when it was sampled, its log-prob and its routes are
functions of (version, position, token), and nothing is sampled while paused; so a test can tell which weights made it.
Faults are scripted with `engine.fail(...)`, requests that arrived are in `engine.requests`.

    engine = FakeEngine(version="0")
    with engine.serve() as url: ...              # a real port, served from a thread
    httpx.AsyncClient(transport=httpx.ASGITransport(engine.app), base_url="http://engine")   # or in-process
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

OPEN_PATHS = ("/health", "/health_generate", "/ready", "/metrics")
NORMAL_PATHS = ("/generate", "/model_info", "/v1/loads", "/server_info")


@dataclass
class Fault:
    """What happens to the next `times` requests of `path`.

    kind: "status" answers `code` with `body` and does nothing; "hang" does not answer for `seconds`, then goes on;
    "garbage" answers 200 with a body that is not JSON; "drop" closes the connection without an answer (500 in-process);
    "after" carries the request out, and then answers `code` with `body`; "mutate" carries it out and passes the JSON
    answer through `change`; "lie" answers success without doing anything.
    """

    path: str
    kind: Literal["status", "hang", "garbage", "drop", "after", "mutate", "lie"]
    times: int = 1
    code: int = 500
    body: dict[str, Any] = field(default_factory=lambda: {"error": {"message": "scripted fault"}})
    seconds: float = 3600.0
    change: Callable[[Any], Any] | None = None


@dataclass
class _Sample:
    rid: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False


def fake_log_prob(version: str, position: int, token: int) -> float:
    """The log-prob that the fake gives to `token` at sequence position `position` under `version`."""
    digest = hashlib.sha256(f"{version}/{position}/{token}".encode()).digest()
    return -(1 + int.from_bytes(digest[:2], "little") / 65536.0)


def fake_routes(version: str, rows: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    """int32 [rows, layers, top_k]: the fake's routes of positions 0 .. rows - 1 under `version`."""
    base = int.from_bytes(hashlib.sha256(version.encode()).digest()[:2], "little")
    position, layer, k = np.meshgrid(np.arange(rows), np.arange(layers), np.arange(top_k), indexing="ij")
    return ((base + position * 3 + layer + k) % experts).astype(np.int32)


def folder_checksum(folder: str | Path) -> str:
    """16 hex digits over the names and bytes of a folder's *.safetensors: changes when a weight does."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class FakeEngine:
    """State of one fake server. Attributes may be changed at any time by the test.

    answer: what to sample: (prompt ids, random source) -> response ids (cut at max_new_tokens). token_seconds: time
    that a token takes. stop_token: ends a response with finish "stop". experts 0: a dense model without routes.
    """

    def __init__(
        self,
        *,
        version: str = "default",
        model_path: str = "/model",
        layers: int = 2,
        top_k: int = 2,
        experts: int = 8,
        token_seconds: float = 0.0,
        answer: Callable[[list[int], random.Random], list[int]] | None = None,
        stop_token: int = 2,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        context: int = 512,
        seed: int = 0,
    ) -> None:
        self.version, self.model_path = version, model_path
        self.layers, self.top_k, self.experts = layers, top_k, experts
        self.token_seconds, self.stop_token, self.context = token_seconds, stop_token, context
        self.answer = answer or (lambda _prompt, rng: [rng.randrange(3, 13) for _ in range(64)])
        self.api_key, self.admin_api_key = api_key, admin_api_key
        self.random = random.Random(seed)
        self.paused: str | None = None
        self.healthy = True
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.running: dict[str, _Sample] = {}
        self.queued: dict[str, _Sample] = {}
        self.waiting = 0
        self.loading = 0  # loads that hold new requests back: SGLang's lock prefers the writer
        self.largest_running = 0
        self.sampled_while_paused = 0
        self.session = False  # an update session is open
        self.groups: set[str] = set()
        self.received_while_unpaused = 0
        self.pauses = self.continues = self.flushes = self.loads = 0
        self._ids = itertools.count()
        self.app = _application(self)

    # --- scripting

    def fail(self, path: str, kind: Any = "status", **options: Any) -> Fault:
        """Script a fault (see Fault); faults of a path are used up in order."""
        fault = Fault(path, kind, **options)
        self.faults.append(fault)
        return fault

    def calls(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests of `path` so far."""
        return [body for seen, body in self.requests if seen == path]

    def take_fault(self, path: str) -> Fault | None:
        """The fault that the present request of `path` meets, or None."""
        for fault in self.faults:
            if fault.path == path and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    @contextlib.contextmanager
    def serve(self, port: int = 0) -> Iterator[str]:
        """Serve on 127.0.0.1 from a thread; gives the base URL; stops within a second or two, whatever still runs."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        config = uvicorn.Config(self.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=5)
            listener.close()

    # --- what the server does

    async def generate(self, body: dict[str, Any]) -> Any:
        """POST /generate: a dict for one prompt with n = 1, else a list; JSONResponse for a refused request."""
        prompts, sampling = body.get("input_ids"), body.get("sampling_params", {})
        if not prompts:
            return _bad("input_ids is empty")
        batch = prompts if isinstance(prompts[0], list) else [prompts]
        n, limit = sampling.get("n", 1), sampling.get("max_new_tokens", 128)
        if any(len(prompt) + limit > self.context for prompt in batch):
            return _bad(f"Requested token count exceeds the model's maximum context length of {self.context} tokens.")
        rid = body.get("rid") or f"r{next(self._ids)}"
        samples = [
            _Sample(f"{rid}_{i}" if n * len(batch) > 1 else rid, list(p))
            for i, p in enumerate(p for p in batch for _ in range(n))
        ]
        answers = await asyncio.gather(*(self._sample(s, sampling, limit, body) for s in samples))
        return answers[0] if len(answers) == 1 and not isinstance(prompts[0], list) else answers

    async def _sample(self, s: _Sample, sampling: dict[str, Any], limit: int, body: dict[str, Any]) -> dict[str, Any]:
        await self._until_admitted(s)
        self.running[s.rid] = s
        self.largest_running = max(self.largest_running, len(self.running))
        finish: dict[str, Any] = {"type": "length", "length": limit}
        stops = {self.stop_token, *sampling.get("stop_token_ids", [])} if not sampling.get("ignore_eos") else set()
        try:
            for token in self.answer(s.prompt, self.random)[:limit]:
                await asyncio.sleep(self.token_seconds)
                await self._until_continued(s)
                if s.aborted:
                    break
                self.sampled_while_paused += self.paused is not None
                s.tokens.append(token)
                s.log_probs.append(fake_log_prob(self.version, len(s.prompt) + len(s.tokens) - 1, token))
                s.versions.append(self.version)
                if token in stops:
                    finish = {"type": "stop", "matched": token}
                    break
        finally:
            self.running.pop(s.rid, None)
        if s.aborted:
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return {"output_ids": s.tokens, "meta_info": self._meta(s, finish, body)}

    def _meta(self, s: _Sample, finish: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(s.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": i, "end": i})
            spans[-1]["end"] = i + 1
        meta: dict[str, Any] = {
            "id": s.rid,
            "finish_reason": finish,
            "prompt_tokens": len(s.prompt),
            "completion_tokens": len(s.tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": spans,
        }
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[lp, t, None] for lp, t in zip(s.log_probs, s.tokens, strict=True)]
        if body.get("return_routed_experts") and self.experts:
            rows = max(len(s.prompt) + len(s.tokens) - 1, 0)
            last = s.versions[-1] if s.versions else self.version
            routes = fake_routes(last, rows, self.layers, self.top_k, self.experts)
            routes = routes[body.get("routed_experts_start_len", 0) :]
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return meta

    async def _until_admitted(self, sample: _Sample) -> None:
        await _until(lambda: not self.loading or sample.aborted)
        await self._until_continued(sample)

    async def _until_continued(self, sample: _Sample) -> None:
        self.queued[sample.rid] = sample
        await _until(lambda: self.paused is None or sample.aborted)
        self.queued.pop(sample.rid, None)

    def abort(self, rid: str | None) -> None:
        """Abort one running request (and those of its n), or all with None."""
        for sample in [*self.running.values(), *self.queued.values()]:
            if rid is None or sample.rid == rid or sample.rid.startswith(f"{rid}_"):
                sample.aborted = True

    async def pause(self, mode: str) -> None:
        """POST /pause_generation."""
        self.pauses += 1
        self.paused = mode
        if mode == "abort":
            self.abort(None)
            await _until(lambda: not self.running)

    async def load(self, body: dict[str, Any]) -> tuple[bool, str]:
        """POST /update_weights_from_disk: (success, message)."""
        if body.get("abort_all_requests"):
            self.abort(None)
        self.loading += 1
        try:
            await _until(lambda: self.paused is not None or not self.running)
            return self._load(body)
        finally:
            self.loading -= 1

    def _load(self, body: dict[str, Any]) -> tuple[bool, str]:
        folder = str(body.get("model_path", ""))
        if not (Path(folder) / "config.json").exists():
            return False, f"Failed to get model config: {folder}"
        self.loads += 1
        if body.get("flush_cache", True) and self.paused == "in_place" and self.running:
            self.version = str(body.get("weight_version") or self.version)  # the trap: loaded, and yet refused
            return False, "Cache flush failed after updating weights."
        self.flushes += bool(body.get("flush_cache", True))
        self.model_path = folder
        version = body.get("weight_version")
        if version is None:
            return True, "Succeeded to update model weights."
        self.version = str(version)
        return True, f"Succeeded to update model weights. Weight version updated to {version}."

    def receive(self, body: dict[str, Any]) -> tuple[bool, str]:
        """POST /update_weights_from_distributed: (success, message)."""
        if not self.session:
            return False, "must run between begin_weight_update() and end_weight_update()"
        if body["group_name"] not in self.groups:
            return False, "Failed to receive weights: Group is not there"
        self.received_while_unpaused += self.paused is None
        self.version = str(body["weight_version"])
        if body["flush_cache"]:
            self.flushes += 1
            self.model_path = self.broadcast_folder(self.version)
        return True, "Succeeded to update parameter online."

    def broadcast_folder(self, name: str) -> str:
        """Where the weights lie that a broadcast under this name brings: the fake receives none."""
        return self.model_path

    def open_session(self) -> tuple[bool, str]:
        """POST /begin_weight_update."""
        if self.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return True, "Success"

    def close_session(self) -> tuple[bool, str]:
        """POST /end_weight_update."""
        was, self.session = self.session, False
        return was, "Success" if was else "no weight-update session is open"

    def checksum(self) -> dict[str, Any]:
        """Answer of /weights_checker with action checksum."""
        total = folder_checksum(self.model_path)
        files = {
            p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in Path(self.model_path).glob("*.safetensors")
        }
        rank = {"checksums": files, "per_gpu_checksum": total, "parallelism_info": []}
        return {"success": True, "message": "Success", "ranks": [rank], "per_engine_checksum": total}


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (tests change the state from another thread: there is no event to await)
        await asyncio.sleep(0.002)


def _bad(message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=400)


def _authorised(engine: FakeEngine, path: str, header: str) -> bool:
    if path in OPEN_PATHS:
        return True
    admin = engine.admin_api_key is not None and path not in NORMAL_PATHS
    key = engine.admin_api_key if admin else engine.api_key
    return key is None or header == f"Bearer {key}"


def _application(engine: FakeEngine) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def scripted(request: Request, call_next: Any) -> Response:
        path = request.url.path
        if not _authorised(engine, path, request.headers.get("authorization", "")):
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        raw = await request.body()
        engine.requests.append((path, await request.json() if raw else {}))
        fault = engine.take_fault(path)
        if fault is None:
            return await call_next(request)  # type: ignore[no-any-return]
        return await _meet(fault, request, call_next)

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        return await engine.generate(await request.json())

    @app.api_route("/model_info", methods=["GET", "POST"])
    @app.api_route("/get_model_info", methods=["GET", "POST"])
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": engine.model_path,
            "tokenizer_path": engine.model_path,
            "is_generation": True,
            "weight_version": engine.version,
            "architectures": ["Qwen3MoeForCausalLM" if engine.experts else "Qwen3ForCausalLM"],
        }

    @app.get("/health")
    @app.get("/health_generate")
    async def health() -> Response:
        return Response(status_code=200 if engine.healthy and engine.paused != "in_place" else 503)

    @app.get("/ready")
    async def ready() -> Response:  # seen in 0.5.23: 503 in every pause mode, 200 after continue
        return Response(status_code=200 if engine.healthy and engine.paused is None else 503)

    @app.post("/pause_generation")
    async def pause(request: Request) -> Any:
        mode = (await _body(request)).get("mode", "abort")
        if mode not in ("abort", "in_place", "retract"):
            return _bad(f"mode must be abort, in_place or retract, got {mode}")
        await engine.pause(mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def resume() -> dict[str, str]:
        engine.continues += 1
        engine.paused = None
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post("/update_weights_from_disk")
    async def update(request: Request) -> JSONResponse:
        success, message = await engine.load(await request.json())
        body = {"success": success, "message": message, "num_paused_requests": 0}
        return JSONResponse(body, status_code=200 if success else 400)

    @app.post("/init_weights_update_group")
    async def join_group(request: Request) -> JSONResponse:
        engine.groups.add((await request.json())["group_name"])
        return _outcome(True, "Succeeded to initialize custom process group.")

    @app.post("/destroy_weights_update_group")
    async def leave_group(request: Request) -> JSONResponse:
        name = (await request.json())["group_name"]
        known = name in engine.groups
        engine.groups.discard(name)
        return _outcome(known, "destroyed" if known else "The group to be destroyed does not exist.")

    @app.post("/begin_weight_update")
    async def begin() -> JSONResponse:
        return _outcome(*engine.open_session())

    @app.post("/end_weight_update")
    async def end() -> JSONResponse:
        return _outcome(*engine.close_session())

    @app.post("/update_weights_from_distributed")
    async def receive(request: Request) -> JSONResponse:
        return _outcome(*engine.receive(await request.json()))

    @app.post("/update_weight_version")
    async def rename(request: Request) -> dict[str, Any]:
        body = await request.json()
        if body.get("abort_all_requests", True):
            engine.abort(None)
        engine.version = str(body["new_version"])
        return {"success": True, "message": "Weight version updated", "new_version": engine.version}

    @app.api_route("/weights_checker", methods=["GET", "POST"])
    async def weights_checker(request: Request) -> dict[str, Any]:
        return engine.checksum()

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush() -> PlainTextResponse:
        if engine.running:
            return PlainTextResponse("Flush cache failed.", status_code=400)
        engine.flushes += 1
        return PlainTextResponse("Cache flushed.")

    @app.post("/abort_request")
    async def abort(request: Request) -> Response:
        body = await _body(request)
        engine.abort(None if body.get("abort_all") else str(body.get("rid", "")))
        return Response(status_code=200)

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        one = {"dp_rank": 0, "num_running_reqs": len(engine.running), "num_waiting_reqs": engine.waiting}
        return {"timestamp": time.time(), "version": "0.5.23", "loads": [one]}

    return app


def _outcome(success: bool, message: str) -> JSONResponse:
    return JSONResponse({"success": success, "message": message}, status_code=200 if success else 400)


async def _body(request: Request) -> dict[str, Any]:
    return dict(await request.json()) if await request.body() else {}


async def _meet(fault: Fault, request: Request, call_next: Any) -> Response:
    if fault.kind == "hang":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_disconnect(request), fault.seconds)
    refusals: dict[str, Callable[[], Response]] = {
        "status": lambda: JSONResponse(fault.body, status_code=fault.code),
        "garbage": lambda: PlainTextResponse("<html>not json</html>"),
        "lie": lambda: JSONResponse({"success": True, "message": "Success", "status": "ok", "num_paused_requests": 0}),
        "drop": _Dropped,
    }
    if fault.kind in refusals:
        return refusals[fault.kind]()
    answer: Response = await call_next(request)
    if fault.kind == "after":
        return JSONResponse(fault.body, status_code=fault.code)
    if fault.kind == "mutate" and fault.change is not None:
        content = b"".join([part async for part in answer.body_iterator])  # type: ignore[attr-defined]
        return JSONResponse(fault.change(json.loads(content)), status_code=answer.status_code)
    return answer


async def _disconnect(request: Request) -> None:
    while not await request.is_disconnected():  # noqa: ASYNC110 (ASGI has no event for it)
        await asyncio.sleep(0.01)


class _Dropped(Response):
    """Announces a body and ends without it: the client sees a connection that broke in the middle of an answer."""

    def __init__(self) -> None:
        super().__init__(content=b"", headers={"content-length": "10"})


def is_fake_log_prob(value: float, version: str, position: int, token: int) -> bool:
    """Whether `value` is what `version` gives to `token` at `position` (after a trip through float32)."""
    return math.isclose(value, fake_log_prob(version, position, token), rel_tol=1e-6)
