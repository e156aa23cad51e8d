"""/docs: a page whose every part comes from this server, and which needs no key to ask for one."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from helpers_api import Client, FakeLLM
from trioserve.server_args import ServerArgs

KEYED = ServerArgs(api_key="k")


class Links(HTMLParser):
    """What a page loads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        if tag in {"script", "img", "iframe", "link"}:
            self.found.append(named.get("src") or named.get("href") or "inline")
        assert not any(name.startswith("on") for name in named), "a policy lets no inline code run"


async def test_all_that_the_page_loads_is_here() -> None:
    client = Client(FakeLLM())
    page = await client.get("/docs")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    links = Links(page.body.decode()).found
    assert "docs/swagger-ui-bundle.js" in links
    for link in links:
        if link != "data:,":
            assert re.fullmatch(r"docs/[\w.-]+", link), link
            reply = await client.get(f"/{link}")
            assert reply.status == 200
            assert len(reply.body) > 100
            assert reply.headers["content-type"].startswith(
                "text/css" if link.endswith(".css") else ("text/javascript", "application/javascript")
            )


async def test_the_browser_is_told_to_load_nothing_from_elsewhere() -> None:
    client = Client(FakeLLM())
    for path in ("/docs", "/docs/docs_page.js"):
        policy = (await client.get(path)).headers["content-security-policy"]
        directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert directives["default-src"] == "'none'"
        assert directives["script-src"] == directives["connect-src"] == "'self'"
        assert directives["frame-ancestors"] == "'none'"
        assert "http" not in policy
    own = [(await client.get(f"/docs/docs_page.{kind}")).body.decode() for kind in ("js", "css")]
    assert not any("://" in text for text in own)


async def test_with_keys_the_page_is_open_and_the_description_is_not() -> None:
    client = Client(FakeLLM(), KEYED)
    page = await client.get("/docs")
    assert page.status == 200
    for link in Links(page.body.decode()).found:
        if link != "data:,":
            assert (await client.get(f"/{link}")).status == 200
    assert (await client.get("/openapi.json")).status == 401
    assert (await client.get("/docs/no-such-file")).status == 401


@pytest.mark.parametrize(
    "args", [ServerArgs(api_key="k", open_paths=""), ServerArgs(api_key="k", disable_docs=True)]
)
async def test_the_page_may_be_closed_too(args: ServerArgs) -> None:
    client = Client(FakeLLM(), args)
    files = ("/docs/swagger-ui.css", "/docs/docs_page.js")
    assert [(await client.get(path)).status for path in files] == [401, 401]


async def test_without_docs_there_is_neither_page_nor_description() -> None:
    client = Client(FakeLLM(), ServerArgs(disable_docs=True))
    for path in ("/docs", "/docs/docs_page.js", "/openapi.json"):
        assert (await client.get(path)).status == 404
    assert (await client.get("/v1/models")).status == 200


@pytest.mark.parametrize(
    "name", ["no-such-file", "..", "docs_page.py", "docs_page.html", "%2e%2e%2fapp.py", "index.html"]
)
async def test_there_are_no_other_files(name: str) -> None:
    assert (await Client(FakeLLM()).get(f"/docs/{name}")).status == 404


async def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    client = Client(FakeLLM())
    first = await client.get("/docs/swagger-ui.css")
    again = await client.get("/docs/swagger-ui.css", if_none_match=first.headers["etag"])
    assert (again.status, again.body) == (304, b"")
