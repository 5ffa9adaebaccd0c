"""How the next token is chosen: the sampling parameters of one request, and their checks."""

from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20


_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Temperature 0 is greedy."""

    max_tokens: int
    """Tokens to make at most, at least 1."""
    temperature: float = 1.0
    """From 0 (greedy) to 2."""
    top_k: int | None = None
    """Keep the k likeliest; None keeps all."""
    top_p: float = 1.0
    """Keep the likeliest whose probabilities sum to this, in (0, 1]."""
    min_p: float = 0.0
    """Drop what is less likely than this share of the likeliest, in [0, 1]."""
    seed: int | None = None
    """Equal seeds give equal outputs, whatever the batch; None draws one."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Go on past the model's own end-of-sequence tokens."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that was made before, from -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off once for each time that it was made, from -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt and answer that are above 0 and multiplies those below, from 0.01 to 100."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit); each token once."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one, from 0 to `MAX_TOP_LOGPROBS`; None: no report."""
    choice: int = 0
    """Which of several answers to one prompt this is; each has its own noise under one seed."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken. Temperatures this low draw nothing else, and divide past fp32's range."""
        return self.temperature < _GREEDY_BELOW

    @property
    def counts_tokens(self) -> bool:
        """Whether what was said before changes what may follow."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)
