"""Passkey prompts: a five-digit key hidden in filler text, asked for at the end.

The simplest of the retrieval tasks of RULER (arXiv 2404.06654), and with several keys its multi-key needles.  A
prompt is put together from lines of text, each tokenized once, so its length is exact and the place of the key is
known in tokens.  The answer is part of the prompt: what a model would decode greedily is read off one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import ProbeError, UsageError

PLACES = (
    *("Oslo", "Lima", "Cairo", "Quito", "Seoul", "Delhi", "Paris", "Tunis", "Accra", "Hanoi", "Dublin", "Prague"),
    *("Berlin", "Madrid", "Lisbon", "Athens", "Warsaw", "Nairobi", "Havana", "Bogota", "Ottawa", "Vienna", "Dakar"),
)
NEEDLE = "The pass key of {place} is {key}.\n"
QUESTION = "\nWhat is the pass key of {place}? The pass key of {place} is"
FILLER = (
    "The bakery on the corner opens before the first bus leaves.\n",
    "Rain fell on the harbour all morning, and the boats stayed in.\n",
    "She put the kettle on and looked for a clean cup.\n",
    "The path follows the river until it reaches the old mill.\n",
    "Most of the chairs in the hall were still stacked against the wall.\n",
    "He read the letter twice and then folded it away.\n",
    "In the evening the wind turned and the clouds broke up.\n",
    "The children had drawn a ship with three masts on the pavement.\n",
    "A cat slept on the warm stones beside the garden gate.\n",
    "The train was late, so they walked along the platform.\n",
    "Nobody could say who had left the window open.\n",
    "The market sells apples, honey and bread on most days.\n",
    "They painted the door green, as it had been before.\n",
    "An owl called from the wood behind the farm.\n",
    "The library keeps its maps in long flat drawers.\n",
    "Her brother mends clocks in a small room upstairs.\n",
    "The soup needed salt, but there was none in the house.\n",
    "Snow lay on the hills long after the fields were bare.\n",
    "The teacher wiped the board and gave back the papers.\n",
    "Two carts stood empty in the yard of the inn.\n",
    "The lamp in the hallway flickers when the stairs creak.\n",
    "He planted beans along the fence and watered them.\n",
    "The bridge is narrow, and only one cart can cross.\n",
    "At noon the square was quiet except for the fountain.\n",
)


@dataclass(frozen=True)
class Prompt:
    """One prompt, its answer included.

    Attributes
    ----------
    ids : ndarray of int64, shape (length,)
    key : str
        The five digits asked for.
    position : int
        Where the key hides: its first token.
    answer : int
        Tokens of the answer, the last ones of `ids`.
    """

    ids: np.ndarray = field(repr=False)
    key: str
    position: int
    answer: int


class PromptWriter:
    """Writes prompts for one tokenizer.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizer

    Raises
    ------
    ProbeError
        There is no tokenizer, or it cannot write digits.
    """

    def __init__(self, tokenizer):
        if tokenizer is None:
            raise ProbeError("retrieval needs a tokenizer to write its prompts, and there is none: use --samples 0.")
        self.tokenizer = tokenizer
        self.newline = self._plain("\n")
        both = tokenizer("a")["input_ids"]
        self.bos = [both[0]] if tokenizer.bos_token_id is not None and both[0] == tokenizer.bos_token_id else []
        self.filler = [self._line(text) for text in FILLER]
        self._parts(PLACES[0], "10000")  # refuses a tokenizer that writes no digits

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _line(self, text: str) -> list[int]:
        """Ids of a text as they are after a line break, where tokenizers begin anew."""
        ids = self._plain("\n" + text)
        return ids[len(self.newline) :] if ids[: len(self.newline)] == self.newline else self._plain(text)

    def _parts(self, place: str, key: str) -> tuple[list[int], list[int], list[int], int]:
        """Ids of the needle, of the question and of the answer, and where the answer is in the needle."""
        needle = self._line(NEEDLE.format(place=place, key=key))
        question = self._line(QUESTION.format(place=place))
        whole = self._line(QUESTION.format(place=place) + f" {key}")
        answer = whole[len(question) :]
        starts = [at for at in range(len(needle)) if needle[at : at + len(answer)] == answer]
        same = whole[: len(question)] == question and len(starts) == 1
        if not same or self.tokenizer.decode(answer).replace(" ", "") != key:
            raise ProbeError(
                f"the tokenizer does not write the digits {key} alike in a sentence and at its end, so no key can be "
                "hidden: use --samples 0."
            )
        return needle, question, answer, starts[0]

    def shortest(self, keys: int = 1) -> int:
        """The fewest tokens that hold so many keys and the question, with no filler; an upper limit."""
        parts = [self._parts(place, "10000") for place in PLACES]
        needle, rest = max(len(n) for n, *_ in parts), max(len(q) + len(a) for _, q, a, _ in parts)
        return len(self.bos) + keys * needle + rest

    def __call__(self, length: int, depth: float, keys: int = 1, sample: int = 0, seed: int = 0) -> Prompt:
        """One prompt of exactly so many tokens.

        Parameters
        ----------
        length : int
            Tokens, the answer included.
        depth : float
            Where in the filler the key hides, from 0 (at the start) to 1 (just before the question); it goes to
            the nearest end of a line.
        keys : int
            Keys hidden, each of another place; the others at random depths.
        sample, seed : int
            The same pair gives the same keys, places and filler at every length and depth.

        Raises
        ------
        UsageError
            The prompt would not fit.
        """
        rng = np.random.default_rng([seed, sample])
        places = rng.permutation(PLACES)
        numbers = rng.choice(np.arange(10000, 100000), len(PLACES), replace=False)
        depths = np.concatenate([[depth], rng.random(len(PLACES))])
        parts = [self._parts(str(place), str(key)) for place, key in zip(places[:keys], numbers, strict=False)]
        _, question, answer, inside = parts[0]
        tail = question + answer
        room = length - len(self.bos) - sum(len(needle) for needle, *_ in parts) - len(tail)
        if room < 0:
            raise UsageError(
                f"a prompt of {length} tokens is too short for {keys} key{'s' * (keys > 1)} and the question: "
                f"use --passkey-lengths of {length - room} or more."
            )
        lines = self._stream(rng, room)
        ends = np.cumsum([0, *map(len, lines)])
        spots = [int(np.abs(ends - share * room).argmin()) for share in depths[:keys]]
        ids, position = list(self.bos), 0
        for spot in range(len(lines) + 1):
            for row in np.flatnonzero(np.array(spots) == spot):
                position = len(ids) + inside if row == 0 else position
                ids += parts[row][0]
            ids += lines[spot] if spot < len(lines) else []
        ids += tail
        found = ids[position : position + len(answer)]
        if len(ids) != length or found != answer:  # cannot happen; a wrong place must never become a number
            raise ProbeError(f"a prompt came out with {len(ids)} tokens of {length}; please report this tokenizer.")
        return Prompt(np.asarray(ids, dtype=np.int64), str(numbers[0]), position, len(answer))

    def _stream(self, rng, room: int) -> list[list[int]]:
        """Lines of filler in random order, `room` tokens in all; the first is cut at its front to fit."""
        lines: list[list[int]] = []
        total = 0
        while total < room:
            for index in rng.permutation(len(self.filler)):
                if total < room:
                    lines.insert(0, self.filler[index])  # so that a longer prompt only adds lines before
                    total += len(self.filler[index])
        return [lines[0][total - room :], *lines[1:]] if lines else []
