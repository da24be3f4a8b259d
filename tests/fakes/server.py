"""The HTTP face of a `FakeEngine`: the paths, fields and status codes of an SGLang 0.5.23 server.

Invariant: every request is written down in `engine.requests` before it meets a fault or is carried out; what a path
does is a method of the engine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from tests.fakes.faults import meet

if TYPE_CHECKING:
    from tests.fakes.engine import FakeEngine

OPEN_PATHS = ("/health", "/health_generate", "/ready", "/metrics")
NORMAL_PATHS = ("/generate", "/model_info", "/v1/loads", "/server_info")


def bad(message: str) -> JSONResponse:
    """A refused request."""
    return JSONResponse({"error": {"message": message}}, status_code=400)


def _authorised(engine: FakeEngine, path: str, header: str) -> bool:
    if path in OPEN_PATHS:
        return True
    admin = engine.admin_api_key is not None and path not in NORMAL_PATHS
    key = engine.admin_api_key if admin else engine.api_key
    return key is None or header == f"Bearer {key}"


def application(engine: FakeEngine) -> FastAPI:
    """The server of an engine."""
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
        return await meet(fault, request, call_next)

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
            return bad(f"mode must be abort, in_place or retract, got {mode}")
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
