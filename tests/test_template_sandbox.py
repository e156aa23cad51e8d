"""Chat templates that would hold the server, fill its memory or look into it."""

from __future__ import annotations

import gc
import re
import resource
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from byte_tokenizer import byte_tokenizer
from helpers_api import Client, FakeLLM
from trioserve.errors import InvalidRequestError
from trioserve.frontend.chat_renderer import ChatRenderer
from trioserve.frontend.chat_template import MAX_FOREIGN_SOURCE, ChatTemplate
from trioserve.frontend.template_limits import MAX_RENDER_SECONDS, MAX_TEXT
from trioserve.server_args import ServerArgs

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGES = [{"role": "user", "content": "Hello"}]
SLACK = 3.0
"""Seconds more than the limit that a busy machine may need."""
MEMORY = 300 * 2**20
"""Bytes that any of the templates may need for a moment."""

ENDLESS = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "loops that leave all out": (
        "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}"
    ),
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "chained filters": (
        "{% set ns = namespace(x=range(100000)) %}{% for i in range(200) %}"
        "{% set ns.x = ns.x|reject('none') %}{% endfor %}{{ ns.x|select('none')|list }}"
    ),
    "searches": "{% set l = range(100000)|list %}{{ l|select('in', l|reverse|list)|list|length }}",
}


def doubling(statement: str, start: str = "(1,)") -> str:
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{statement}{{% endfor %}}"


NESTED = doubling("{% set ns.x = (ns.x, ns.x) %}")
HUGE = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000s'|format('a') }}",
    "{{ ('%9999d' * 3000) % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{:1000000000}'.format_map({}) }}",
    "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '\\t'.expandtabs(10**9) }}",
    "{{ messages|map('center', 10**9)|list }}",
    "{{ ('a\\n' * 100000)|indent(100000) }}",
    "{{ (['a'] * 100000)|join('a' * 100000) }}",
    "{{ range(100000)|join('a' * 100000) }}",
    "{{ (['a' * 100000] * 100000)|select|join }}",
    "{{ ('a' * 100000).join(['a'] * 100000) }}",
    "{{ ('a' * 100000)|replace('a', 'a' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'a' * 100000) }}",
    "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "{{ ('a' * 8000000)|list }}",
    "{{ ('a ' * 4000000).split() }}",
    "{{ ('a ' * 4000000).split(' ') }}",
    "{{ ('\\n' * 8000000).splitlines() }}",
    "{{ ('a ' * 4000000)|title }}",
    "{{ ('a' * 8000000)|e|e|e|e|e }}",
    "{{ [1]|slice(10**9)|list }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ range(10**9)|list }}",
    "{{ {'a': 1}|tojson(indent=10**9) }}",
    "{{ {'a': 1}|tojson(indent='a' * 1000000) }}",
    "{{ 10**(10**9) }}",
    "{{ (10**1000) * (10**1000) * (10**1000) }}",
    "{{ ('f' * 8000000)|int(0, 16) // 7 }}",
    "{{ 1.5|round(10**9, 'ceil') }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ lipsum(n=100000) }}",
    doubling("{% set ns.x = ns.x ~ ns.x %}", "'a'") + "{{ ns.x }}",
    doubling("{% set ns.x = ns.x + ns.x %}", "'a'") + "{{ ns.x }}",
    doubling("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", "'a'") + "{{ ns.x }}",
    doubling("{% set ns.x = ns.x + ns.x %}", "[1]") + "{{ ns.x }}",
    doubling("{% set ns.x = ns.x * ns.x %}", "3") + "{{ ns.x }}",
    NESTED + "{{ ns.x }}",
    NESTED + "{{ ns.x ~ 'a' }}",
    NESTED + "{{ ns.x|string }}",
    NESTED + "{{ ns.x|tojson }}",
    NESTED + "{{ '%s' % (ns.x,) }}",
    NESTED + "{{ '{}'.format(ns.x) }}",
    NESTED + "{{ ns.x == ns.x|list }}",
    NESTED + "{{ 1 in ns.x }}",
    NESTED + "{{ {ns.x: 1} }}",
    NESTED + "{{ {}[ns.x] }}",
    NESTED + "{{ {}.get(ns.x) }}",
    NESTED + "{{ dict([(ns.x, 1)]) }}",
    NESTED + "{{ [ns.x]|unique|list }}",
    "{% set s = 'a' * 8000000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
    "{% set s = 'a' * 8000000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(100000) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "{% set l = ['b' ~ 'a' * 1000000, 'c' ~ 'a' * 1000000] * 50000 %}{{ l|sort|length }}",
]
TOO_DEEP = [
    "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
    "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{% for x in [1] %}" * 100 + "{% endfor %}" * 100,
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{{ a" + ".b" * 15000 + " }}",
    "{{ [" + "b," * 15000 + "] }}",
]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''['__class__'] }}",
    "{{ (''|attr)('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ [messages]|groupby('__class__') }}",
    "{{ [messages]|sum('__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{{ ['{0.__class__}'.format]|map('string')|list }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ lipsum.__globals__ }}",
    "{{ config.items() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ range.mro() }}",
    "{{ dict.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear }}",
    "{{ messages[0].items }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import path %}",
    "{% extends '/etc/passwd' %}",
    "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__ }}",
    "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
]
INTERNALS = re.compile(r"0x[0-9a-f]{4}|/[a-z_]+/|\.py\b|Traceback|<class|<built-in|<function")


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """A rendering's time is not spent on collecting what the tests before it have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_memory_bombs() -> Iterator[None]:
    """A template that takes more than it may fails the test, and not the machine."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


def refusal(source: str, **options: Any) -> InvalidRequestError:
    """Rendering must fail, in bounded processor time."""
    started = time.thread_time()
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate.foreign(source, byte_tokenizer()).render(MESSAGES, **options)
    assert time.thread_time() - started < MAX_RENDER_SECONDS + SLACK
    assert caught.value.parameter == "chat_template"
    return caught.value


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_is_ended(source: str) -> None:
    assert "longer than 1 s" in str(refusal(source))


@pytest.mark.parametrize("source", HUGE)
def test_a_template_that_makes_much_from_little_is_refused(source: str) -> None:
    assert not re.search("longer than|too complex", str(refusal(source)))  # neither time nor memory ran out


@pytest.mark.parametrize("source", TOO_DEEP, ids=range(len(TOO_DEEP)))
def test_a_template_without_bottom_is_refused(source: str) -> None:
    assert re.search("nested too deeply|too complex", str(refusal(source)))


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_sees_nothing_but_the_conversation(source: str) -> None:
    template = ChatTemplate.foreign(source, byte_tokenizer())
    try:
        shown = template.render(MESSAGES)
    except InvalidRequestError as error:
        shown = str(error)
    assert not INTERNALS.search(shown), shown
    assert "root:" not in shown
    assert MESSAGES == [{"role": "user", "content": "Hello"}]


def test_the_models_own_template_has_the_same_limits() -> None:
    own = ChatTemplate("{{ 'a' * 10**9 }}", bos_token=None, eos_token=None)
    with pytest.raises(InvalidRequestError, match="characters") as caught:
        own.render(MESSAGES)
    assert caught.value.parameter == "messages"


def test_a_long_conversation_is_rendered_whole_up_to_the_limit() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content | trim }}{% endfor %}", bos_token=None, eos_token=None
    )
    content = "x" * (MAX_TEXT // 4)
    message = {"role": "user", "content": content}
    assert template.render([message] * 3) == content * 3
    with pytest.raises(InvalidRequestError, match=str(MAX_TEXT)):
        template.render([message] * 5)


def test_a_foreign_template_has_a_length() -> None:
    with pytest.raises(InvalidRequestError, match=rf"at most {MAX_FOREIGN_SOURCE} characters, got 32769"):
        ChatTemplate.foreign("x" * (MAX_FOREIGN_SOURCE + 1), byte_tokenizer())


def test_a_syntax_error_names_its_line() -> None:
    assert "line 2" in str(refusal("\n{% if %}"))


def test_a_reason_that_a_template_gives_is_told_in_part() -> None:
    error = refusal("{{ raise_exception('roles must ' ~ 'alternate ' * 100000) }}")
    assert "roles must alternate" in str(error)
    assert len(str(error)) < 2000


async def test_the_loop_goes_on_while_a_foreign_template_runs() -> None:
    renderer = ChatRenderer(byte_tokenizer(), "small")
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await trio.sleep(0.001)
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turn)
        with pytest.raises(InvalidRequestError, match="longer"):
            await renderer.render(MESSAGES, chat_template=ENDLESS["nested loops"])
        nursery.cancel_scope.cancel()
    assert turns > 20  # of up to a thousand; a loop that is held takes none


async def test_a_model_without_a_template_can_be_given_one() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    renderer = ChatRenderer(tokenizer, "small")
    with pytest.raises(InvalidRequestError, match="small has no chat template"):
        await renderer.render(MESSAGES)
    assert await renderer.render(MESSAGES, chat_template="{{ messages[0].content }}!") == "Hello!"


async def test_a_request_brings_a_template_only_where_it_is_trusted() -> None:
    body = {"messages": MESSAGES, "chat_template": "x"}
    reply = await Client(FakeLLM()).post("/v1/chat/completions", body)
    assert reply.status == 400
    assert reply.error["param"] == "chat_template"
    assert "--trust-request-chat-template" in reply.error["message"]
    llm = FakeLLM()
    reply = await Client(llm, ServerArgs(trust_request_chat_template=True)).post("/v1/chat/completions", body)
    assert reply.status == 200
    assert llm.rendered[0]["chat_template"] == "x"
