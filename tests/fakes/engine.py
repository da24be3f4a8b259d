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
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi.responses import StreamingResponse

from tests.fakes.faults import Fault
from tests.fakes.model import fake_log_prob, fake_routes, folder_checksum
from tests.fakes.server import application, bad


@dataclass
class _Sample:
    rid: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    aborted: bool = False
    finish: dict[str, Any] | None = None


class FakeEngine:
    """State of one fake server. Attributes may be changed at any time by the test.

    answer: what to sample: (prompt ids, random source) -> response ids (cut at max_new_tokens). token_seconds: time
    that a token takes. stop_token: ends a response with finish "stop". experts 0: a dense model without routes.
    most_tokens: a sample that has so many waits until this is raised or None, or it is aborted; see `held`.
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
        self.most_tokens: int | None = None
        self.healthy = True
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.running: dict[str, _Sample] = {}
        self.queued: dict[str, _Sample] = {}
        self.incremental = False  # a server with --incremental-streaming-output
        self.waiting = 0
        self.loading = 0  # loads that hold new requests back: SGLang's lock prefers the writer
        self.largest_running = 0
        self.sampled_while_paused = 0
        self.session = False  # an update session is open
        self.groups: set[str] = set()
        self.received_while_unpaused = 0
        self.pauses = self.continues = self.flushes = self.loads = 0
        self._ids = itertools.count()
        self.app = application(self)

    # --- scripting

    def fail(self, path: str, kind: Any = "status", **options: Any) -> Fault:
        """Script a fault (see Fault); faults of a path are used up in order."""
        fault = Fault(path, kind, **options)
        self.faults.append(fault)
        return fault

    def calls(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests of `path` so far."""
        return [body for seen, body in self.requests if seen == path]

    def held(self, samples: int) -> bool:
        """Whether `samples` samples run, and each has `most_tokens` tokens: none can end before the test goes on."""
        running = list(self.running.values())
        return len(running) == samples and all(len(s.tokens) == self.most_tokens for s in running)

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
            return bad("input_ids is empty")
        batch = prompts if isinstance(prompts[0], list) else [prompts]
        n, limit = sampling.get("n", 1), sampling.get("max_new_tokens", 128)
        if any(len(prompt) + limit > self.context for prompt in batch):
            return bad(f"Requested token count exceeds the model's maximum context length of {self.context} tokens.")
        rid = body.get("rid") or f"r{next(self._ids)}"
        samples = [
            _Sample(f"{rid}_{i}" if n * len(batch) > 1 else rid, list(p))
            for i, p in enumerate(p for p in batch for _ in range(n))
        ]
        single = len(samples) == 1 and not isinstance(prompts[0], list)
        if body.get("stream"):
            messages = self._stream(samples, sampling, limit, body, single)
            return StreamingResponse(messages, media_type="text/event-stream")
        await asyncio.gather(*(self._sample(s, sampling, limit) for s in samples))
        answers = [self._answer(s, body) for s in samples]
        return answers[0] if single else answers

    async def _stream(
        self, samples: list[_Sample], sampling: dict[str, Any], limit: int, body: dict[str, Any], single: bool
    ) -> AsyncIterator[bytes]:
        every = sampling.get("stream_interval") or 1
        sent = [0] * len(samples)
        work = [asyncio.create_task(self._sample(s, sampling, limit)) for s in samples]
        left = dict(enumerate(samples))
        try:
            while left:
                for i, s in list(left.items()):
                    new, ended = len(s.tokens) - sent[i], s.finish is not None
                    if ended or new >= every or (new and not sent[i]):
                        message = self._answer(s, body, sent[i] if self.incremental else 0)
                        sent[i] = len(s.tokens)
                        yield f"data: {json.dumps(message if single else message | {'index': i})}\n\n".encode()
                    if ended:
                        del left[i]
                await asyncio.sleep(0.002)
            yield b"data: [DONE]\n\n"
        finally:
            for s, task in zip(samples, work, strict=True):
                s.aborted = True
                task.cancel()

    async def _sample(self, s: _Sample, sampling: dict[str, Any], limit: int) -> None:
        await self._until_admitted(s)
        self.running[s.rid] = s
        self.largest_running = max(self.largest_running, len(self.running))
        finish: dict[str, Any] = {"type": "length", "length": limit}
        stops = {self.stop_token, *sampling.get("stop_token_ids", [])} if not sampling.get("ignore_eos") else set()
        try:
            for token in self.answer(s.prompt, self.random)[:limit]:
                await asyncio.sleep(self.token_seconds)
                await _until(partial(self._may_sample, s))
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
        s.finish = finish

    def _answer(self, s: _Sample, body: dict[str, Any], start: int = 0) -> dict[str, Any]:
        """What an answer, or a message of a stream, says of a sample. start: first token that it names."""
        return {"output_ids": s.tokens[start:], "meta_info": self._meta(s, body, start)}

    def _meta(self, s: _Sample, body: dict[str, Any], start: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": s.rid,
            "finish_reason": s.finish,
            "prompt_tokens": len(s.prompt),
            "completion_tokens": len(s.tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
        }
        if body.get("return_logprob"):
            entries = [[lp, t, None] for lp, t in zip(s.log_probs, s.tokens, strict=True)]
            meta |= {"input_token_logprobs": [], "output_token_logprobs": entries[start:]}
        if s.finish is None:  # as SGLang: the rest is in the last message of a stream alone
            return meta
        meta["weight_versions"] = _spans(s.versions)
        if body.get("return_routed_experts") and self.experts:
            rows = max(len(s.prompt) + len(s.tokens) - 1, 0)
            last = s.versions[-1] if s.versions else self.version
            routes = fake_routes(last, rows, self.layers, self.top_k, self.experts)
            routes = routes[body.get("routed_experts_start_len", 0) :]
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        return meta

    def _may_sample(self, s: _Sample) -> bool:
        most = self.most_tokens  # read once: the test's thread changes it
        return most is None or len(s.tokens) < most or s.aborted

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


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for i, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": i, "end": i})
        spans[-1]["end"] = i + 1
    return spans


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (tests change the state from another thread: there is no event to await)
        await asyncio.sleep(0.002)
