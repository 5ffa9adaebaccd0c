"""Progress of a training run, as lines for a terminal or a log."""

import time

LINE_EVERY = 50  # steps


class Progress:
    """Prints the mean loss and the speed every `LINE_EVERY` steps and at the end."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.started_at = time.monotonic()
        self.losses: list[float] = []
        self.tokens = 0

    def note(self, step: int, loss: float, tokens: int) -> None:
        self.losses.append(loss)
        self.tokens += tokens
        if (step + 1) % LINE_EVERY and step + 1 < self.steps:
            return
        spent = time.monotonic() - self.started_at
        mean = sum(self.losses) / len(self.losses)
        speed = f"{self.tokens / spent:.0f} tokens/s, {spent:.0f} s"
        print(f"{self.name}: step {step + 1}/{self.steps}, loss {mean:.4f}, {speed}", flush=True)
        self.losses.clear()
