"""GET /docs: /openapi.json for people, by Swagger UI. All that the page is made of comes from here.

The page holds nothing of this server's, so it needs no API key. It asks for one, to load the description and
to try requests with; the key stays in the page's memory.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

from quart import send_file
from werkzeug.exceptions import NotFound

if TYPE_CHECKING:
    from quart import Response

__all__ = ["DOCS_FILES", "send_docs_file", "send_docs_page"]

_SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css")
_OWN = ("docs_page.css", "docs_page.js")

DOCS_FILES = tuple(f"/docs/{name}" for name in (*_OWN, *_SWAGGER_UI))
"""The paths that the page loads, beside the description."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MAX_AGE = 3600
"""Seconds that a browser may use a file without asking."""


async def send_docs_page() -> Response:
    return await _send(Path(__file__).with_name("docs_page.html"))


async def send_docs_file(name: str) -> Response:
    """Raises NotFound."""
    if name in _OWN:
        return await _send(Path(__file__).with_name(name))
    if name in _SWAGGER_UI:
        # The package is made for Flask; only its files are used.
        file = distribution("flask-swagger-ui").locate_file(f"flask_swagger_ui/dist/{name}")
        return await _send(Path(str(file)))
    raise NotFound


async def _send(path: Path) -> Response:
    response = await send_file(path, cache_timeout=_MAX_AGE, conditional=True)
    response.headers.update(_HEADERS)
    return response
