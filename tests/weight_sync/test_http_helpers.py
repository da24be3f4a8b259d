"""services/http.py: secrets, who may listen where, and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from httpx import ASGITransport, AsyncClient

from configs.load import ConfigError
from configs.secrets import read_secret
from services.http import OpenServiceError, harden, is_loopback, refuse_open_service, token_matches


def test_a_secret_comes_from_the_environment_or_from_the_file_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from-file\n")
    assert read_secret("T", {"T": "given"}) == "given"
    assert read_secret("T", {"T_FILE": str(file)}) == "from-file"
    assert read_secret("T", {}) is None


@pytest.mark.parametrize("content", [None, ""])
def test_a_secret_that_was_configured_and_cannot_be_read_is_an_error_and_not_an_open_door(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="T_FILE"):
        read_secret("T", {"T_FILE": str(file)})


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_listening_beyond_this_machine_needs_a_token_or_an_explicit_setting(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    if loopback:
        refuse_open_service(host, None, {})
        return
    with pytest.raises(OpenServiceError, match="LAGRANGE_API_TOKEN"):
        refuse_open_service(host, None, {})
    refuse_open_service(host, "token", {})
    refuse_open_service(host, None, {"LAGRANGE_ALLOW_OPEN_API": "1"})


def test_tokens_match_only_if_equal() -> None:
    assert token_matches("ä", "ä")
    assert not token_matches("a", "ab")


async def test_an_unexpected_error_says_nothing_of_its_cause() -> None:
    app = FastAPI()
    harden(app)

    @app.get("/")
    async def broken() -> None:
        raise RuntimeError("/secret/path")

    async with AsyncClient(transport=ASGITransport(app, raise_app_exceptions=False), base_url="http://x") as http:
        answer = await http.get("/")
    assert answer.status_code == 500
    assert answer.json()["error"]["reason"] == "internal"
    assert "secret" not in answer.text
