"""A small tokenizer, common chat templates and random conversations."""

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from graftwork.platform.clock import ManualClock
from graftwork.sessions.text.chat_template import ChatTemplate
from graftwork.sessions.text.encoding import PromptEncoder
from graftwork.sessions.text.tokenizer import TextTokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK_TAGS = ("<think>", "</think>")
SPECIAL_NAMES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
CORPUS = [
    "user assistant system tool\n",
    'The weather in Paris is sunny. {"name": "get_weather", "arguments": {"city": "Paris", "day": "today"}}\n',
    "What is the time in Zürich? Let me look. naïve café 東京 🙂\n",
]

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system<|h|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- eos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|im_start|>ipython<|h|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- eos_token }}
    {%- elif message.tool_calls is defined %}
        {{- "<|im_start|>assistant<|h|>\\n\\n" }}
        {%- generation %}
        {%- for call in message.tool_calls %}
            {%- if loop.index > 2 %}{%- break %}{%- endif %}
            {{- '{"name": "' + call.function.name + '", ' }}
            {{- '"parameters": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}" }}
        {%- endfor %}
        {{- eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '<|h|>\\n\\n'+ message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant<|h|>\\n\\n' }}
{%- endif %}
"""

THINKING = (
    CHATML.replace(
        "{%- for message in messages %}",
        """{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}""",
        1,
    )
    .replace(
        "        {{- '<|im_start|>assistant\\n' + (message.content or '') }}",
        """        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.asked and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}""",
    )
    .replace(
        "    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n",
        """    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {%- if opens_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
""",
    )
)
"""A template of a model that thinks: it shows the reasoning of the answers to the last message of the user alone."""

INSTRUCT = """\
{%- set ns = namespace(index=0, system=none) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}{{- '[TOOLS] ' + (tools | tojson) + ' [/TOOLS]' }}{%- endif %}
        {{- '[INST] ' }}
        {%- if ns.system and loop.first %}{{- ns.system + '\\n\\n' }}{%- endif %}
        {{- message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- for call in message.tool_calls or [] %}
            {%- set ns.index = ns.index + 1 %}
            {{- '[CALL ' ~ ns.index ~ '] ' + (call.function | tojson) }}
        {%- endfor %}
        {{- ' ' + (message.content or '') + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT] ' + (dict(content=message.content, id=message.tool_call_id) | tojson(sort_keys=true)) }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool messages can follow, not ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT}


@cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer of some 330 tokens, with Llama's way to split words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*VISIBLE, *THINK_TAGS)])
    return str(tokenizer.to_str())


@cache
def text_tokenizer() -> TextTokenizer:
    return TextTokenizer(tokenizer_json())


def as_sent(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as a client sends it: arguments are JSON texts."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(conversation))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


def chat_template(source: str = CHATML, clock: ManualClock | None = None) -> ChatTemplate:
    return ChatTemplate(source, clock or ManualClock(), special_tokens=SPECIAL_NAMES)


def prompt_encoder(source: str = CHATML) -> PromptEncoder:
    return PromptEncoder(chat_template(source), text_tokenizer())


def token_id(token: str) -> int:
    found = text_tokenizer().token_id(token)
    assert found is not None
    return found


texts = (
    st.text(max_size=12) | st.sampled_from([*CORPUS, "", " ", "\n", "a\n\n b", "é", "🙂", "</tool>", "{{ x }}"])
).filter(lambda text: not any(token in text for token in (*SPECIAL, *VISIBLE, *THINK_TAGS)))
"""Text without the spelling of an added token, which transformers would make a control token and we do not."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, json_values, max_size=3)
names = st.sampled_from(["get_weather", "sum", "größe"])
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": names, "description": texts, "parameters": arguments}),
        }
    ),
    max_size=2,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Chat messages as templates read them: arguments are objects."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        calls = draw(st.lists(st.tuples(names, arguments), max_size=2))
        messages += _answer(draw(texts), calls, [draw(texts) for _ in calls])
    return messages


def _answer(text: str, calls: list[tuple[str, Any]], results: list[str]) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        answer["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": given}}
            for index, (name, given) in enumerate(calls)
        ]
    answers = [
        {"role": "tool", "content": result, "tool_call_id": f"call_{index}"} for index, result in enumerate(results)
    ]
    return [answer, *answers]
