"""Chat templates that loop or allocate without bound are refused; others give the same text as transformers."""

from __future__ import annotations

import json
import time

import pytest

from tests.unit.data.tokenize.test_chat import CHATML, TOKENS
from tidewheel.data.tokenize.chat import ChatTemplate, Refused, read_template
from tidewheel.errors import InputError

pytest.importorskip("jinja2")

NESTED = "".join(f"{{% for x{depth} in range(1000) %}}" for depth in range(9)) + "{% endfor %}" * 9
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}"
SHARED = "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
BRANCHES = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LONG = "{% set s = 'ab' * 1000000 %}"
ATTACKS = {
    "nested loops": NESTED,
    "loop with a long body": "{% for i in range(99999) %}" + "text " * 30_000 + "{% endfor %}",
    "kept output": "{% set s = 'ab' * 500000 %}{% set x %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endset %}",
    "recursive loop": "{% for x in [[1], [2]] recursive %}{{ loop([[1], [2]]) }}{% endfor %}",
    "macro tree": BRANCHES,
    "lazy filters": NESTED.replace("range(1000)", "range(99999) | map('string')"),
    "plus": DOUBLING.replace("OP", "+"),
    "tilde": DOUBLING.replace("OP", "~"),
    "list plus": DOUBLING.replace("OP", "+").replace("'ab'", "[1]"),
    "times": "{{ 'a' * 10000000000 }}",
    "list times": "{% set x = [1] * 10000000000 %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (9999999999, 1) }}",
    "format": "{{ '{:>99999999999}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "format filter": "{{ '%99999999999d' | format(1) }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "method center": "{{ 'a'.center(9999999999) }}",
    "to_bytes": "{{ (1).to_bytes(9999999999, 'big') }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(99999) }}",
    "indent": "{{ ('\n' * 100000) | indent(99999) }}",
    "replace": LONG + "{{ s | replace('a', s) }}",
    "replace nothing": LONG + "{{ s.replace('', s) }}",
    "join": LONG + "{{ s | join(s) }}",
    "method join": LONG + "{{ s.join(s) }}",
    "wordwrap": LONG + "{{ s | wordwrap(1, wrapstring=s) }}",
    "sum": "{{ (([[1] * 1000]) * 10000) | sum(start=[]) }}",
    "tojson": "{{ ([1] * 1000000) | tojson(indent=99999) }}",
    "comments": "{{ ('<!---->' * 1000000) | striptags }}",
    "shared, shown": SHARED + "{{ ns.x }}",
    "shared, tojson": SHARED + "{{ ns.x | tojson }}",
    "shared, joined": SHARED + "{{ 'a' ~ ns.x }}",
    "shared, compared": SHARED + SHARED.replace("ns", "n2") + "{{ ns.x == n2.x }}",
    "shared, tested": SHARED + SHARED.replace("ns", "n2") + "{{ ns.x is eq(n2.x) }}",
    "shared, percent": SHARED + "{{ '%s' % (ns.x,) }}",
    "compare": LONG + "{% set t = s ~ 'a' %}{% for i in range(99999) %}{% if s in t %}{% endif %}{% endfor %}",
    "slices": LONG + "{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
    "upper": LONG + "{% for i in range(99999) %}{% set t = s.upper() %}{% endfor %}",
    "split": LONG + "{% for i in range(99999) %}{% set t = s.split('a') %}{% endfor %}",
    "lipsum": "{{ lipsum(9999999) }}",
}
"""Templates without bound, by what they do."""


@pytest.mark.parametrize("name", ATTACKS)
def test_a_template_without_bound_is_refused_within_seconds(name):
    config = json.dumps({**TOKENS, "chat_template": ATTACKS[name]}).encode()
    begin = time.process_time()
    with pytest.raises((InputError, Refused)):
        ChatTemplate(read_template(config, None, where="t"), ()).text([{"role": "user", "content": "a"}])
    assert time.process_time() - begin < 10


def test_read_template_refuses_a_template_without_bound():
    with pytest.raises(InputError, match="loops or builds more than any chat template needs"):
        read_template(None, NESTED.encode(), where="model/chat_template.jinja")
    with pytest.raises(InputError, match="recursive loop"):
        read_template(None, ATTACKS["recursive loop"].encode(), where="t")


def test_a_long_conversation_is_rendered():
    template = ChatTemplate(read_template(None, CHATML.encode(), where="t"), ())
    messages = [{"role": role, "content": "word " * 200} for role in ("user", "assistant") * 2000]
    assert len(template.text(messages)) > 4_000_000
    messages = [{"role": "user", "content": "word " * 2_000_000}]
    assert len(template.text(messages)) > 10_000_000


HONEST = """{%- macro shown(content, depth=0) -%}
{%- if content is string -%}{{- content | trim -}}
{%- elif content is mapping -%}
    {%- for key, value in content | dictsort -%}{{ key }}={{ shown(value, depth + 1) }};{%- endfor -%}
{%- else -%}
    {%- for item in content -%}
        {{ loop.index }}/{{ loop.length }}:{{ shown(item) }}{{ ', ' if not loop.last }}
    {%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, names=[], text='') -%}
{%- for m in messages[::-1] -%}{%- set index = (messages | length - 1) - loop.index0 -%}
{%- if ns.last < 0 and m.role == 'user' and not (m.content is string and m.content.startswith('<tool>')) -%}
{%- set ns.last = index -%}{%- endif -%}{%- endfor -%}
{%- for m in messages if m.role != 'nobody' -%}
{%- set ns.names = ns.names + [m.role] -%}{%- set ns.text = ns.text ~ loop.index0 ~ (m.content is none) -%}
{{- '<|im_start|>' + m['role'] + '\\n' + shown(m.content) -}}
{%- if loop.index0 > ns.last and 'x' in m.content %} {{- m.content.split('x')[-1].lstrip('\\n') | upper }}{% endif -%}
{{- m | tojson(indent=2) }}{{ '%s-%05d' | format(m.role, loop.index) }}{{ '%s' % m.role }}{{ '{:>5}'.format(1) }}
{%- if loop.index > 4 -%}{%- break -%}{%- endif -%}
{%- else -%}nothing{%- endfor -%}
{{ ns.names | unique | join(', ') }}{{ ns.text }}{{ messages | map(attribute='role') | list }}{{ 'ab' * 3 }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | join('|') }}{{ 2 ** 10 }}{{ 7 // 2 }}
{{ messages[0].content | default('none') | replace('a', 'bb') | indent(4) }}{{ 'a' | center(9) }}{{ undefined_name }}
{{ messages | rejectattr('role', 'in', ['user', 'tool']) | list | length }}{{ messages[0].get('absent') }}{{ 7 % 4 }}
{{ messages[0] | items | list }}{{ [1, 2] * 2 }}{{ range(4) | sum }}{{ {'a': [1, {'b': none}]} }}"""


def test_an_honest_template_gives_the_same_text_as_transformers():
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "system", "content": "  a system \n prompt "},
                {"role": "user", "content": "xylophones\nand x\n y"},
                {"role": "assistant", "content": "no x here"}, {"role": "user", "content": "<tool>{'a': 1}"}]
    template = ChatTemplate(read_template(None, HONEST.encode(), where="t"), ())
    for count in range(1, len(messages) + 1):
        expected = transformers._compile_jinja_template(HONEST).render(
            messages=messages[:count], add_generation_prompt=False, tools=None, documents=None)
        assert template.text(messages[:count]) == expected
