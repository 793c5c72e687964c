"""Chat templates in a child process: a template cannot hang or harm this process."""

import gc
import os
import signal
import sys
import threading
import time
from collections import UserDict, UserList
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models

from dovetail import LLM
from dovetail.errors import ConfigError, RequestError, StartError
from dovetail.sandbox.child import BoundedChild, ChildFailure, ChildLimits
from dovetail.sandbox.frames import encode
from dovetail.sandbox.pool import ChildPool
from dovetail.tokenizers.chat_template import ChatTemplateEnvironment, render_chat_template
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer
from dovetail.tokenizers.template_renderer import _TASK, TemplateRenderer
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.harnesses.process_tree import open_files_of

TALK = [{"role": "user", "content": "hi"}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TIGHT = ChildLimits(timeout_s=0.25, memory_bytes=192 << 20)
PATIENT = ChildLimits(timeout_s=30.0, memory_bytes=512 << 20)  # for valid chats on a busy machine
NESTED = (
    "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
TWO_NESTED = NESTED + NESTED.replace("n.x", "n.y").replace("namespace(x", "namespace(x=n.x, y")
WIDE = "{% set w = ['a' * 1000000] * 60000 %}"
LONG = "{% set w = 'a' * 1000000 %}"
ATTACKS = [
    NESTED + "{{ n.x | tojson }}",
    NESTED + "{{ n.x }}",
    TWO_NESTED + "{{ n.x < n.y }}",
    TWO_NESTED + "{{ [n.x] | unique | list }}",
    NESTED + "{{ '{}'.format(n.x) }}",
    WIDE + "{{ w | tojson }}",
    WIDE + "{{ w ~ '' }}",
    WIDE + "{{ w | batch(1000) | map('join') | join }}",
    LONG + "{{ w | wordwrap(1, wrapstring=w) }}",
    LONG + "{{ w | replace('a', w) }}",
    LONG + "{% for i in range(9999) %}{{ w | list | sort | join | length }}{% endfor %}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%*d' | format(1000000, 1) }}",
    "{{ '{:>{w}}'.format(1, w=999999999) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set n = namespace(x=[]) %}{% for i in range(150000) %}{% set n.x = [n.x] %}{% endfor %}"
    "{{ n.x }}",
    "{% for i in range(199999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
    "{{ lipsum(n=1000) }}",
    "{{ cycler.__init__.__globals__.os.system('touch /tmp/x') }}",
]  # fmt: skip
MORE_ATTACKS = [
    NESTED + "{{ n.x | tojson(indent=2) }}",
    NESTED + "{{ n.x | string }}",
    NESTED + "{{ n.x | pprint }}",
    NESTED + "{{ n.x ~ '' }}",
    TWO_NESTED + "{{ n.x == n.y }}",
    NESTED + "{{ '%s' | format(n.x) }}",
    WIDE + "{{ w | string }}",
    WIDE + "{{ w | join }}",
    WIDE + "{{ ','.join(w) }}",
    WIDE + "{{ w | sum(start='') }}",
    LONG + "{{ (w | replace('a', '\\t')).expandtabs(1000000) }}",
    LONG + "{{ w | list | join(w) }}",
    LONG + "{% for i in range(9999) %}{{ w | urlize | length }}{% endfor %}",
    LONG + "{% for i in range(9999) %}{{ (w ~ '<') | striptags | length }}{% endfor %}",
    LONG + "{% for i in range(9999) %}{{ w | title | length }}{% endfor %}",
    "{% set r = range(99999) | list %}{% for i in range(40) %}{{ (r * 8) | sort | length }}"
    "{{ (r * 8) | groupby(0) | length }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{% for i in range(150000) %}{{ [i] * 99999 == [i] * 99999 }}{% endfor %}",
]  # fmt: skip


def rss_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def children():
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if f"\nPPid:\t{os.getpid()}\n" in (path / "status").read_text(errors="replace"):
                found.append(int(path.name))
    return found


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer()


@pytest.fixture
def pool():
    created = ChildPool(_TASK, TIGHT)
    yield created
    created.close()


@pytest.mark.costly
@pytest.mark.parametrize("attacks", [ATTACKS, pytest.param(MORE_ATTACKS, marks=pytest.mark.slow)])
def test_every_malicious_template_raises_a_typed_error_and_a_valid_chat_still_works(attacks):
    """The peak memory of this process must not grow. A valid chat must be rendered correctly."""
    attacked, rejected = TemplateRenderer(TIGHT), []
    renderer = TemplateRenderer(PATIENT)
    expected = renderer.render(PLAIN, TALK, {})
    stop, gaps = threading.Event(), []

    def chat():
        while not stop.is_set():
            before = time.perf_counter()
            assert renderer.render(PLAIN, TALK, {}) == expected
            gaps.append(time.perf_counter() - before)
            time.sleep(0.01)

    other = threading.Thread(target=chat)
    other.start()
    gc.collect()
    before = rss_kib()
    try:
        for source in attacks:
            try:
                text = attacked.render(source, TALK, {})
            except RequestError as error:
                rejected.append(source)
                assert error.parameter in ("messages", "chat_template") and len(str(error)) < 800
            else:
                assert len(text) <= 1 << 20 and "class" not in text
    finally:
        stop.set()
        other.join()
    assert rss_kib() - before < 40 << 10
    assert len(rejected) >= len(attacks) - 4, set(attacks) - set(rejected)
    assert len(gaps) > 10


@pytest.mark.costly
def test_simultaneous_malicious_templates_do_not_delay_a_valid_chat(pool):
    """Three template processes reach their deadline while a fourth renders a valid chat."""

    def request(template):
        now = datetime(2026, 2, 3).isoformat()
        return encode({"template": template, "messages": TALK, "variables": {}, "now": now})

    failures = []

    def attack():
        try:
            pool.call(request(NESTED + "{{ n.x | string }}"))
        except ChildFailure as failure:
            failures.append(str(failure))

    attackers = [threading.Thread(target=attack) for _ in range(3)]
    for attacker in attackers:
        attacker.start()
    assert pool.call(request(PLAIN)) == "[user]hi"
    for attacker in attackers:
        attacker.join()
    assert len(failures) == 3 and all("0.25 s" in item or "memory" in item for item in failures)
    assert pool.call(request(PLAIN)) == "[user]hi"


@pytest.mark.clock
def test_rendering_in_a_running_template_process_adds_less_than_a_millisecond(renderer):
    messages = [{"role": "user", "content": "hi " * 100}] * 20
    environment = ChatTemplateEnvironment(now=datetime.now)
    template = environment.compile_template(PLAIN)

    def median(function):
        times = []
        for _ in range(101):
            before = time.perf_counter()
            function()
            times.append(time.perf_counter() - before)
        return sorted(times)[50]

    separate = median(lambda: renderer.render(PLAIN, messages, {}))
    here = median(lambda: render_chat_template(template, messages, {}))
    assert separate - here < 1e-3


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": b"x"}], "bytes"),
        ([{"role": "user", "content": object()}], "object"),
        ([{"role": "user", "content": {1: 2}}], "keys must be strings"),
        ([{"role": "user", "content": 1 << 2000}], "1024 bits"),
        ([{"role": "user", "content": "x" * (1 << 23)}], "characters"),
        ([{"role": "user", "content": [1] * 200_000}], "values"),
        ([], "empty"),
        ("hello", "list of messages"),
    ],
)
def test_the_error_for_an_invalid_template_argument_names_it(renderer, messages, reason):
    for arguments, name in ((messages, "messages"), (TALK, "tools")):
        variables = {"tools": messages} if name == "tools" else {}
        if name == "tools" and not isinstance(messages, list):
            continue
        if name == "tools" and not messages:
            continue
        with pytest.raises(RequestError, match=reason) as rejection:
            renderer.render(PLAIN, arguments, variables)
        assert rejection.value.parameter == name


def test_a_recursive_list_as_a_template_argument_is_rejected(renderer):
    own = []
    own.append(own)
    with pytest.raises(RequestError, match="64 levels") as rejection:
        renderer.render(PLAIN, TALK, {"tools": own})
    assert rejection.value.parameter == "tools"


def test_template_arguments_may_be_any_mappings_sequences_and_strings(renderer):
    chat = UserList([UserDict(role="user", content=("a\ud800", "é😀\0", 2**70, 1.5, None, True))])
    text = renderer.render("{{ messages[0].content | tojson }}|{{ messages[0].role }}", chat, {})
    assert text == '["a\ud800", "é😀\\u0000", 1180591620717411303424, 1.5, null, true]|user'


@pytest.mark.parametrize("template", [3, b"x", ["x"], "x" * (1 << 19)])
def test_an_invalid_chat_template_is_rejected(renderer, template):
    with pytest.raises(RequestError) as rejection:
        renderer.render(template, TALK, {})
    assert rejection.value.parameter == "chat_template" and len(str(rejection.value)) < 300


def test_a_template_error_with_unusual_characters_can_be_encoded(renderer):
    with pytest.raises(RequestError, match=r"\\ud800 é") as rejection:
        renderer.render("{{ raise_exception('\\ud800 \\u00e9') }}", TALK, {})
    assert str(rejection.value).encode()


def test_the_template_process_uses_the_local_date_of_its_parent():
    renderer = TemplateRenderer(now=lambda: datetime(2026, 2, 3))
    assert renderer.render("{{ strftime_now('%d %b %Y') }}", TALK, {}) == "03 Feb 2026"


def test_the_template_process_inherits_no_environment_or_files_of_its_parent(pool, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    child = BoundedChild(_TASK, TIGHT)
    try:
        folder = Path(f"/proc/{child.pid}")
        environment = (folder / "environ").read_bytes()
        assert b"SECRET" not in environment and b"PYTHON" not in environment
        assert (folder / "cwd").readlink() == Path("/")
        links = open_files_of(child.pid)
        kinds = sorted(link.split(":")[0].split(" ")[0] for link in links)
        # the shared memory for heartbeats and the socket to the parent
        own = ["/memfd", "anon_inode", "socket", "socket"]
        assert kinds == sorted(["/dev/null"] * 3 + own), kinds
        limits = (folder / "limits").read_text()
        assert str(TIGHT.memory_bytes) in limits.split("Max address space")[1].split("\n")[0]
    finally:
        child.close()
        os.close(reading)
        os.close(writing)


def test_a_template_process_can_start_before_the_first_call(pool):
    pool.start_child()
    end_s = time.monotonic() + 30
    while not pool._idle:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    (child,) = pool._children
    text = encode({"template": PLAIN, "messages": TALK, "variables": {}, "now": "2026-02-03"})
    assert pool.call(text) == "[user]hi"
    assert pool._children == {child}


def test_a_killed_template_process_is_replaced(pool):
    text = encode({"template": PLAIN, "messages": TALK, "variables": {}, "now": "2026-02-03"})
    assert pool.call(text) == "[user]hi"
    (child,) = pool._children
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert pool.call(text) == "[user]hi"
    assert len(pool._children) == 1 and child not in pool._children


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_forked_process_starts_its_own_template_processes(pool):
    """A forked process neither uses nor stops its parent's child, and closes its connection."""
    text = encode({"template": PLAIN, "messages": TALK, "variables": {}, "now": "2026-02-03"})
    assert pool.call(text) == "[user]hi"
    before = children()
    (child,) = pool._children
    connections = [child._connection.fileno(), child._child.control.fileno()]
    forked = os.fork()
    if forked == 0:
        closed = not any(map(is_open, connections))
        os._exit(0 if closed and pool.call(text) == "[user]hi" else 1)
    assert os.waitpid(forked, 0)[1] == 0
    assert pool.call(text) == "[user]hi"
    assert set(before) <= set(children())


def test_a_template_process_that_cannot_start_raises_a_typed_error(monkeypatch):
    pool = ChildPool(_TASK, TIGHT)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    pool.start_child()  # only the call reports that it has failed
    with pytest.raises(StartError, match="could not start"):
        pool.call(b"{}")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StartError, match="status 1"):
        pool.call(b"{}")
    assert not pool._children


@pytest.mark.costly
def test_the_limits_of_the_template_process_are_tokenizer_options(tmp_path):
    write_fake_config(tmp_path, vocab_size=300)
    Core(models.WordLevel({"<s>": 0}, unk_token="<s>")).save(str(tmp_path / "tokenizer.json"))
    options = {"template_timeout_s": 0.25, "template_memory_mib": 160}
    arguments = HuggingFaceTokenizer.options_model(**options)
    tokenizer = HuggingFaceTokenizer.from_directory(tmp_path, options=arguments.model_dump())
    with pytest.raises(RequestError, match=r"0\.25 s"):
        tokenizer.apply_chat_template(TALK, chat_template=NESTED + "{{ n.x | string }}")
    with pytest.raises(ConfigError, match="template_timeout_s"):
        LLM(
            tmp_path,
            worker_cls="dovetail_devkit.fakes.worker:FakeWorker",
            plugin_options={"huggingface": {"template_timeout_s": 0}},
            **SMALL_ENGINE,
        )
