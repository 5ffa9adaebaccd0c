r"""Matches regular expressions against module names, in linear time.

Uploads contain such expressions: PEFT's rank_pattern, alpha_pattern, target_modules and exclude_modules. Python's `re`
backtracks, so one hostile pattern could block the process for hours. Invariant: `re` never gets a pattern from an
upload.
Owns the automaton of a pattern (Thompson, 1968): a match reads the name once and keeps the set of possible states.
Supports the part of the regular expression language that module names need. Refuses any other feature with an error
that names the feature.

As in PEFT, a pattern of rank_pattern or alpha_pattern matches a whole name, or the end of a name after one of its dots.
A pattern of target_modules or exclude_modules matches only whole names:

    re.match(r"(.*\.)?(pattern)$", name)     rank_pattern, alpha_pattern
    re.fullmatch(pattern, name)              target_modules, exclude_modules
"""

from graftwork.adapters.format.pattern_parser import (
    Anchor,
    Characters,
    Choice,
    Node,
    PatternParser,
    PatternRefused,
    Repeat,
    Sequence,
)

MAX_PATTERN_CHARACTERS = 256
MAX_STATES = 1024


class _Automaton:
    """An automaton of numbered states. An edge reads one character or none.

    An edge that reads nothing may be passable only at the start or at the end of the name.
    """

    def __init__(self) -> None:
        self.free: list[list[tuple[int, Anchor | None]]] = []
        self.by_character: list[tuple[frozenset[str], int] | None] = []

    def add_state(self) -> int:
        if len(self.free) >= MAX_STATES:
            raise PatternRefused("it is too large once its repeats are written out")
        self.free.append([])
        self.by_character.append(None)
        return len(self.free) - 1

    def add(self, node: Node, start: int) -> int:
        """Adds the states that match `node`, beginning at the state `start`.

        Returns the state in which the match ends.
        """
        match node:
            case Characters(members):
                end = self.add_state()
                entry = start if self.by_character[start] is None else self._linked(start)
                self.by_character[entry] = (members, end)
                return end
            case Anchor():
                return self._linked(start, node)
            case Sequence(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Choice(options):
                return self._add_choice(options, start)
            case Repeat():
                return self._add_repeat(node, start)

    def _linked(self, start: int, anchor: Anchor | None = None) -> int:
        end = self.add_state()
        self.free[start].append((end, anchor))
        return end

    def _add_choice(self, options: tuple[Node, ...], start: int) -> int:
        ends = [self.add(option, self._linked(start)) for option in options]
        end = self.add_state()
        for option_end in ends:
            self.free[option_end].append((end, None))
        return end

    def _add_repeat(self, repeat: Repeat, start: int) -> int:
        for _ in range(repeat.least):
            start = self.add(
                repeat.node, self._linked(start)
            )  # one state for each repeat, so repeats of an empty part are limited too
        if repeat.most is None:
            loop = self._linked(start)
            self.free[self.add(repeat.node, loop)].append((loop, None))
            return self._linked(loop)
        skips = [start]
        for _ in range(repeat.most - repeat.least):
            skips.append(self.add(repeat.node, self._linked(skips[-1])))
        end = self.add_state()
        for skip in skips:
            self.free[skip].append((end, None))
        return end


class NamePattern:
    """One regular expression for module names, from an upload.

    The constructor raises PatternRefused for a pattern that is not supported.
    """

    def __init__(self, text: str, *, is_whole: bool = False) -> None:
        """With `is_whole`, the pattern must match a whole name, not only an end of it."""
        if len(text) > MAX_PATTERN_CHARACTERS or not text.isascii():
            raise PatternRefused(f"it must be at most {MAX_PATTERN_CHARACTERS} ASCII characters")
        self._automaton = _Automaton()
        self.work = 0
        """The number of states visited so far. A caller with many patterns uses it as a limit."""
        self._start = self._automaton.add_state()
        self._end = self._automaton.add(PatternParser(text).parse(), self._start)
        self._after_dot = frozenset() if is_whole else self._reach({self._start}, at_start=False, at_end=False)
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    @property
    def num_states(self) -> int:
        return len(self._automaton.free)

    def matches(self, name: str) -> bool:
        """Returns whether the pattern matches the whole `name`.

        If the pattern was made without `is_whole`, it may also match the end of `name` after one of its dots.
        """
        states = self._reach({self._start}, at_start=True, at_end=not name)
        for character in name:
            states = self._step(states, character)
        return self._end in self._reach(states, at_start=not name, at_end=True)

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        """Returns the states after one more character. Results are cached, because many module names are similar."""
        found = self._steps.get((states, character))
        if found is None:
            edges = (self._automaton.by_character[state] for state in states)
            found = self._reach({edge[1] for edge in edges if edge and character in edge[0]}, False, False)
            if character == ".":
                found |= self._after_dot
            self._steps[states, character] = found
        return found

    def _reach(self, states: set[int] | frozenset[int], at_start: bool, at_end: bool) -> frozenset[int]:
        """Returns `states` and all states that follow them without reading a character."""
        reached, waiting = set(states), list(states)
        while waiting:
            for target, anchor in self._automaton.free[waiting.pop()]:
                passable = anchor is None or (at_start if anchor.at_start else at_end)
                if passable and target not in reached:
                    reached.add(target)
                    waiting.append(target)
        self.work += len(reached)
        return frozenset(reached)
