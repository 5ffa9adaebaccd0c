"""The tokenizer of the demo model: byte-level BPE whose words look the same wherever they stand.

A run of letters, a digit, a newline, a minus and a run of anything else are split before merging, and a space never
joins the word after it.
So `Paris` has the same tokens in prose, in JSON and in a tool result, and copying it needs no spelling.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from graftwork.demo.conversations import Conversation
from graftwork.demo.tasks import JOBS, training_conversation

VOCABULARY_SIZE = 1024
MAX_TOKENS = 2048
PIECES = r"\p{L}+|\p{N}|\n|-|[^\p{L}\p{N}\n-]+"
START, END, PADDING = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTROL_TOKENS = (PADDING, START, END)
VISIBLE_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
ALL_TOKENS = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS + VISIBLE_TOKENS))
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CORPUS_CONVERSATIONS_PER_JOB = 1500


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Learns merges from the conversations of every job, so that an adapter finds its words as tokens too."""
    template_only = wrap(Tokenizer(models.BPE()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(CONTROL_TOKENS) - len(VISIBLE_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(template_only, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PADDING,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE.read_text(),
    )


def corpus(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterable[str]:
    """The text between the added tokens, which must not teach the merges."""
    for job in JOBS:
        random = Random(f"tokenizer {job} {seed}")
        for _ in range(CORPUS_CONVERSATIONS_PER_JOB):
            yield from ALL_TOKENS.split(render(tokenizer, training_conversation(job, random)))


def render(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> str:
    text = tokenizer.apply_chat_template(conversation.messages, tools=list(conversation.tools) or None, tokenize=False)
    assert isinstance(text, str)
    return text
