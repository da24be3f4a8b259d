"""Client of SGLang's native HTTP API: samples with what the engine says about each token, checked before use.

Invariant: a `Sample` that exists is complete: token ids, log-probs, version runs and routes have matching lengths and
every version is an integer. Every call ends within its time limit, with a result or one of the errors below.

Seen with SGLang 0.5.23 on a CPU (tests/rollout/test_real_engine.py holds most of it):
- The log-probs are those of the temperature-scaled distribution log_softmax(logits / T): they differ from a float32
  forward pass by at most 2.4e-7 at T = 0.5, 1.0 and 1.7, while unscaled ones differ by 0.1 to 0.5. top_p and top_k do
  not renormalise them. So the trainer divides its logits by T.
- `n` gives a list of n answers, each with an id of its own; n = 1 gives one object. The request's `rid` then names
  none of them: an /abort_request for it ends nothing. One request with n is 4 to 6 times faster than n requests.
  It runs the prompt alone first and the n samples then share its KV cache; n copies of a short prompt in one request
  save that pass and take a quarter less of the server's time.
- An aborted request answers 200, finish type "abort", with the tokens, log-probs, versions and routes made so far.
- A stop token is part of output_ids, with its log-prob.
- A token id outside the vocabulary ends the whole server, so ids are checked here before they are sent.
- Without --enable-return-routed-experts the routes are silently absent.
- A stream's message has log-probs and a version, and routes only when it is the last (rollout/stream.py).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import anyio
import httpx
import numpy as np

from broker.types import Float32Array, Int32Array, RouteArray, VersionRun
from rollout.cancellable import cancellable
from rollout.checkpoint import Checkpoint
from rollout.stream import Arrivals, BadMessage, ErrorMessage

FINISHES = ("stop", "length", "abort")
COPIED_PROMPT = 64  # tokens: up to so many, computing a prompt n times costs less than a pass of its own


class EngineError(Exception):
    """An engine did not give a usable answer. `retriable`: whether the same request may succeed later or elsewhere."""

    retriable = True


class EngineUnreachable(EngineError):
    """No connection could be made, so the request did nothing."""


class EngineDropped(EngineError):
    """The connection broke before the answer was complete."""


class KeyRefused(EngineError):
    """The engine does not accept our API key; every request would be refused."""


class EngineTimeout(EngineError):
    """No answer within the time limit."""


class EngineBusy(EngineError):
    """The engine answered 429 or 5xx."""


class RequestRefused(EngineError):
    """The engine, or a check before sending, refused the request itself (4xx)."""

    retriable = False


class InvalidAnswer(EngineError):
    """The answer's parts contradict each other, or one is missing."""


class UnconfirmedVersion(InvalidAnswer):
    """Tokens were sampled under a version that is not an integer: weights that weight-sync has not confirmed."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One response. token_ids: int32 [response]; log_probs: float32 [response]; versions: runs that cover the response.

    routes: uint8 or uint16 [prompt + response - 1 - routes_start, layers, top_k] of sequence positions from
    `routes_start`, or None for a dense model. finish: "stop", "length" or "abort". cached_tokens: prompt tokens that
    the engine had in its cache.
    """

    token_ids: Int32Array
    log_probs: Float32Array
    versions: tuple[VersionRun, ...]
    routes: RouteArray | None
    routes_start: int
    finish: str
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn. stop_ids: tokens that end one (they are part of it). max_new_tokens: at most so many.

    ignore_end: no token ends one, so that each has max_new_tokens (benchmarks, tests).
    """

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()
    ignore_end: bool = False


class EngineClient:
    """Talks to one engine; use as an async context manager. Safe for any number of tasks of one event loop."""

    def __init__(
        self,
        url: str,
        checkpoint: Checkpoint,
        *,
        api_key: str | None,
        timeout_s: float,
        priority: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """timeout_s: longest wait for one answer, in seconds. transport: for tests.

        priority: of its requests on an engine that schedules by priority; others refuse it. None: says none.
        """
        self.url, self.checkpoint, self._timeout_s, self._priority = url, checkpoint, timeout_s, priority
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        times = httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0))
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=times, limits=limits, transport=transport, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests in flight end with an error."""
        await self._http.aclose()

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: Sampling, *, routes_start: int = 0
    ) -> list[Sample | InvalidAnswer]:
        """`n` samples of one prompt, in one request; an answer that cannot be used stands as its error in its place.

        routes_start: first sequence position whose routes come back. Raises EngineError as a whole request can fail.
        """
        answers = await self.ask_generate(prompt_ids, n, sampling, routes_start)
        return [self._sample(answer, len(prompt_ids), routes_start) for answer in answers]

    async def stream(
        self,
        prompt_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        *,
        every: int,
        stall_s: float,
    ) -> tuple[list[Sample | EngineError], EngineError | None]:
        """As `generate`, in messages of `every` tokens: what arrived is kept if the engine dies, and goes on elsewhere.

        Returns the samples and what broke the stream off, None if nothing did; one that broke off has finish "abort",
        and one of which nothing can be kept is that error. stall_s: longest silence once it has begun, in seconds.
        Raises EngineError if nothing arrived at all.
        """
        body = self._generate_body(prompt_ids, n, sampling, 0)
        body["sampling_params"]["stream_interval"] = every
        arrivals = Arrivals(n)
        broke: EngineError | None = None
        try:
            await self._receive({**body, "stream": True}, arrivals, stall_s)
        except EngineError as error:
            broke = None if arrivals.complete else error
        answers = [sample.answer() for sample in arrivals.samples]
        if broke is not None and not any(answers):
            raise broke
        samples = [broke if a is None and broke else self._sample(a, len(prompt_ids), 0) for a in answers]
        return samples, broke

    @cancellable
    async def _receive(self, body: Mapping[str, Any], arrivals: Arrivals, stall_s: float) -> None:
        """Read a stream to its end."""
        with self._errors("/generate"), anyio.fail_after(self._timeout_s) as limit:
            end = limit.deadline
            async with self._http.stream("POST", "/generate", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._check("/generate", response.status_code, response.text)
                async for line in response.aiter_lines():
                    arrivals.add(line)
                    limit.deadline = min(end, anyio.current_time() + stall_s)
        if not arrivals.complete:
            raise EngineDropped(f"{self.url}/generate: the stream ended before its samples did")

    async def ask_generate(
        self, prompt_ids: Sequence[int], n: int, sampling: Sampling, routes_start: int
    ) -> list[dict[str, Any]]:
        """As `generate`, but the answers as they are, unchecked."""
        answers = await self._call("POST", "/generate", self._generate_body(prompt_ids, n, sampling, routes_start))
        answers = answers if isinstance(answers, list) else [answers]
        if len(answers) != n:
            raise InvalidAnswer(f"{len(answers)} answers for n = {n}")
        return answers

    async def model_info(self) -> dict[str, Any]:
        """/model_info: model_path, weight_version, ..."""
        answer = await self._call("GET", "/model_info")
        if not isinstance(answer, dict):
            raise InvalidAnswer("/model_info is not an object")
        return answer

    async def healthy(self) -> None:
        """Raises EngineError unless the engine has started and answers its own health check."""
        await self._call("GET", "/health", empty=True)

    async def freeze_garbage_collector(self) -> None:
        """Let the engine's garbage collectors pass over what is there since its start: a tenth less CPU time."""
        await self._call("POST", "/freeze_gc", empty=True)

    async def running(self) -> int:
        """Requests that the engine computes or has waiting."""
        answer = await self._call("GET", "/v1/loads")
        try:
            return sum(int(x["num_running_reqs"]) + int(x["num_waiting_reqs"]) for x in answer["loads"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"/v1/loads: {error!r}") from error

    def _generate_body(
        self, prompt_ids: Sequence[int], n: int, sampling: Sampling, routes_start: int
    ) -> dict[str, Any]:
        """Of /generate. Raises RequestRefused for what would harm the engine."""
        self._check_prompt(prompt_ids, sampling, routes_start)
        prompt, copies = list(prompt_ids), n > 1 and len(prompt_ids) <= COPIED_PROMPT
        parameters = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": sampling.ignore_end,
            "n": 1 if copies else n,
        }
        body: dict[str, Any] = {"input_ids": [prompt] * n if copies else prompt, "sampling_params": parameters}
        body["return_logprob"] = True
        if self._priority is not None:
            body["priority"] = self._priority
        if self.checkpoint.routed:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routes_start}
        return body

    def _check_prompt(self, prompt_ids: Sequence[int], sampling: Sampling, routes_start: int) -> None:
        c = self.checkpoint
        if not len(prompt_ids):
            raise RequestRefused("the prompt is empty")
        if min(prompt_ids) < 0 or max(prompt_ids) >= c.vocabulary:
            raise RequestRefused(
                f"the prompt has token ids outside 0 .. {c.vocabulary - 1}: another model's tokenizer?"
            )
        if len(prompt_ids) + sampling.max_new_tokens > c.context:
            raise RequestRefused(
                f"{len(prompt_ids)} prompt and {sampling.max_new_tokens} new tokens exceed the context of {c.context}"
            )
        if not 0 <= routes_start < len(prompt_ids):
            raise RequestRefused(f"routes_start {routes_start} is not a position of a prompt of {len(prompt_ids)}")

    def _sample(self, answer: Any, prompt: int, routes_start: int) -> Sample | InvalidAnswer:
        try:
            return parse_sample(answer, self.checkpoint, prompt, routes_start)
        except InvalidAnswer as error:
            return error

    @cancellable
    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, empty: bool = False) -> Any:
        with self._errors(path):
            with anyio.fail_after(self._timeout_s):  # httpx's limits are for each read, this is for all of it
                response = await self._http.request(method, path, json=body)
            self._check(path, response.status_code, response.text)
        if empty:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise InvalidAnswer(f"{self.url}{path}: the answer is not JSON") from error

    def _check(self, path: str, status: int, text: str) -> None:
        """Raises the error that a status stands for."""
        if status == 429 or status >= 500:
            raise EngineBusy(f"{self.url}{path}: {status} {text[:200]}")
        if status in (401, 403):
            raise KeyRefused(f"{self.url} refuses the API key. Set LAGRANGE_ENGINE_API_KEY to the engine's.")
        if status != 200:
            raise RequestRefused(f"{self.url}{path}: {status} {text[:200]}")

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """What goes wrong on the way as an EngineError."""
        try:
            yield
        except httpx.ConnectTimeout as error:
            raise EngineUnreachable(f"{self.url}{path}: no connection") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise EngineTimeout(f"{self.url}{path}: none in {self._timeout_s:g} s, or a stream stood still") from error
        except httpx.ConnectError as error:
            raise EngineUnreachable(f"{self.url}{path}: {error}") from error
        except httpx.HTTPError as error:
            raise EngineDropped(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        except BadMessage as error:
            raise InvalidAnswer(f"{self.url}{path}: {error}") from error
        except ErrorMessage as error:
            self._check(path, error.code, str(error))
            raise InvalidAnswer(f"{self.url}{path}: {error}") from error


def parse_sample(answer: Any, checkpoint: Checkpoint, prompt: int, routes_start: int) -> Sample:
    """One object of /generate's answer as a Sample. prompt: tokens of the prompt. Raises InvalidAnswer."""
    try:
        meta = answer["meta_info"]
        ids = np.asarray(answer["output_ids"], np.int32)
        finish = str(meta["finish_reason"]["type"])
        entries = meta["output_token_logprobs"]
        log_probs = np.asarray([entry[0] for entry in entries], np.float32)
        named = [int(entry[1]) for entry in entries]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise InvalidAnswer(f"/generate: {type(error).__name__}: {error}") from error
    n = len(ids)
    if finish not in FINISHES:
        raise InvalidAnswer(f"finish reason {finish!r}")
    if ids.ndim != 1 or named != ids.tolist():
        raise InvalidAnswer(f"log-probs name {len(named)} tokens, the response has {n}, and they are not the same")
    if not np.isfinite(log_probs).all():
        raise InvalidAnswer("a log-prob is not finite")
    if n == 0 and finish != "abort":
        raise InvalidAnswer("a response without tokens that was not aborted")
    if n and (ids.min() < 0 or ids.max() >= checkpoint.vocabulary):
        raise InvalidAnswer(f"a token id is outside 0 .. {checkpoint.vocabulary - 1}")
    if n == 0:  # aborted before its first token: there is nothing to have versions or routes
        return Sample(ids, log_probs, (), None, routes_start, finish)
    if checkpoint.routed and meta.get("num_retractions"):
        raise InvalidAnswer(
            "the engine's cache was full, so it computed a response anew: its routes are not those of its log-probs"
        )
    versions = _versions(meta.get("weight_versions"), n)
    rows = max(prompt + n - 1 - routes_start, 0)
    routes = decode_routes(meta.get("routed_experts"), checkpoint, rows) if checkpoint.routed else None
    return Sample(ids, log_probs, versions, routes, routes_start, finish, int(meta.get("cached_tokens") or 0))


def _versions(spans: Any, n: int) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    at = 0
    if not isinstance(spans, list):
        raise InvalidAnswer("weight_versions is missing: this needs SGLang 0.5.23 or newer")
    for span in spans:
        try:
            name, start, end = str(span["version"]), int(span["start"]), int(span["end"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidAnswer(f"weight_versions: {error!r}") from error
        if start == end:
            continue
        if not (name.isascii() and name.isdecimal()):
            raise UnconfirmedVersion(f"sampled under version {name!r}, which is not an integer")
        if start != at or end < start or (runs and int(name) < runs[-1].version):
            raise InvalidAnswer(f"weight_versions do not continue at token {at}: {spans}")
        runs.append(VersionRun(start, end - start, int(name)))
        at = end
    if at != n:
        raise InvalidAnswer(f"weight_versions cover {at} of {n} tokens")
    return tuple(runs)


def decode_routes(text: Any, checkpoint: Checkpoint, rows: int) -> RouteArray:
    """base64 of int32, little-endian, C order -> uint8 (uint16 from 257 experts) [rows, layers, top_k].

    Raises InvalidAnswer if the routes are absent, not of that shape, or name an expert that does not exist.
    """
    if not isinstance(text, str):
        raise InvalidAnswer("routed_experts is missing: the engine runs without --enable-return-routed-experts")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidAnswer("routed_experts is not base64") from error
    size = 4 * checkpoint.layers * checkpoint.top_k
    if len(raw) != rows * size:
        raise InvalidAnswer(f"routed_experts has {len(raw)} bytes, expected {rows} rows of {size}")
    wide = np.frombuffer(raw, "<i4").reshape(rows, checkpoint.layers, checkpoint.top_k)
    if rows and (wide.min() < 0 or wide.max() >= checkpoint.experts):
        raise InvalidAnswer(f"routed_experts names experts {wide.min()} .. {wide.max()} of {checkpoint.experts}")
    return wide.astype(np.uint8) if checkpoint.experts <= 256 else wide.astype(np.uint16)
