"""What prompts of a wanted length are made of: token ids, or words of one token each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Prompt = str | list[int]

# Common words: nearly every vocabulary holds each, with the space before it, as one token.
_COMMON = """
a about above across act after again against age ago air all along also always among and animal answer any area
as ask at back bad base be bed before began being below best better between big black blue body book both box boy
bring brought build built but by call came can car care carry case center change check children city class clear
close cold color come common complete could country course cut dark day deep did difference different direct do
does dog done door down draw dry during each early earth east easy eat end enough even ever every example eye face
fact fall family far farm fast father feel feet few field figure fill final find fine fire first fish five fly
follow food foot for force form found four free friend from full game gave get girl give go gold good got great
green ground group grow had half hand happen hard has have head hear heard heart heat heavy help her here high
him his hold home horse hot hour house how hundred idea if in inch interest into is it just keep kind king knew
know land language large last late laugh lay lead learn leave left less let letter life light like line list
little live long look lot love low machine made main make man many map mark may mean measure men might mile mind
minute money moon more morning most mother mountain move much music must my name near need never new next night
no north note nothing notice noun now number of off often oh old on once one only open or order other our out over
own page paper part pass pattern people person picture piece place plain plan plane plant play point power press
problem product pull put question quick rain ran reach read ready real record red rest right river road rock room
round rule run said same saw say school science sea second see seem self sentence serve set several shape she ship
short should show side simple since sing size sleep slow small snow so some song soon sound south space special
"""
WORDS: tuple[str, ...] = tuple(_COMMON.split())
# Words tokenized in one request when a server is asked which are one token each.
GROUP = 8


class Units:
    """Draws prompts of an exact number of units: token ids where `units` are numbers, words where they are texts."""

    def __init__(self, units: Sequence[int] | Sequence[str]) -> None:
        assert units
        self._units: Any = units

    def draw(self, count: int, rng: random.Random) -> list[int] | list[str]:
        """`count` units at random."""
        drawn: list[int] | list[str] = rng.choices(self._units, k=count)
        return drawn

    def join(self, *pieces: list[int] | list[str]) -> Prompt:
        """One prompt of several draws."""
        ids: list[int] = []
        words: list[str] = []
        for piece in pieces:
            for unit in piece:
                if isinstance(unit, str):
                    words.append(unit)
                else:
                    ids.append(unit)
        return " ".join(words) if words or not ids else ids


def single_tokens(tokenize: Callable[[str], list[int]]) -> tuple[list[int], list[str]]:
    """Token ids of WORDS, and those words that are one token each wherever they stand, as `tokenize` says.

    `tokenize` must add no special tokens. A group with a longer word is left out whole.
    """
    ids: dict[int, None] = {}
    words: list[str] = []
    for start in range(0, len(WORDS), GROUP):
        group = WORDS[start : start + GROUP]
        found = tokenize(" " + " ".join(group))
        if len(found) == len(group):
            ids.update(dict.fromkeys(found))
            # A text's first word has no space before it, and may be another token or two.
            if len(tokenize("\n".join(group))) == 2 * len(group) - 1:
                words.extend(group)
    return list(ids), words
