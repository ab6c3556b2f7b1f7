"""What each section of a report is called and measures; the page prints it in this order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """Heading of a section.

    Attributes
    ----------
    title : str
    question : str
        What a reader asks.
    words : str
        What is measured, in a sentence or two.
    papers : tuple of (str, str)
        Name and arXiv number of where it comes from.
    """

    title: str
    question: str
    words: str
    papers: tuple[tuple[str, str], ...] = ()


_ROUND = ("Round and Round We Go", "2410.06205")
_FOPE = ("Fourier Position Embedding", "2412.17739")
_BASE = ("Base of RoPE Bounds Context Length", "2405.14591")

ABOUT = {
    "inspect": About(
        "Geometry",
        "What does this checkpoint rotate, and how far does its base carry?",
        "Channels of queries and keys turn in pairs, each at its own frequency. Pairs below the floor never finish a "
        "turn within the length that the model was trained for. L_bound is the longest distance up to which the sum "
        "of all cosines stays positive, so that a similar token can still be preferred. All of this follows from the "
        "configuration.",
        (_BASE,),
    ),
    "bands": About(
        "Frequency band",
        "Which frequencies carry the norm, and is that where theory puts them?",
        "For every token the pair with the largest key norm is noted; the most frequent one of each head, averaged "
        "over heads, is i_band. Usage is the product of mean query and mean key norm of a pair, the bound on what it can "
        "add to a score. The prediction uses base and trained length alone.",
        (_ROUND,),
    ),
    "heads": About(
        "Heads",
        "What do heads attend to, and whose band is it?",
        "Mean attention weights by distance give every head a role: positional heads rest on a fixed distance of 0 to "
        "4 tokens, induction heads on what followed the last copy of the token, sinks on the first position.",
        (_ROUND,),
    ),
    "similarity": About(
        "Similarity",
        "Do similar tokens get more attention?",
        "For every query its keys are ranked twice, by how similar their hidden states are to its own and by the score "
        "that the head gives them; rho is the rank correlation of the two. At fixed distance it is free of the wish to "
        "look nearby.",
        (_BASE,),
    ),
    "truncate": About(
        "Truncation",
        "Which pairs' rotation does the model need?",
        "The slowest pairs stop turning, a few more with every setting, and the likelihood of the same text is "
        "compared with that of the intact model. The critical keep is the smallest share of turning pairs at which perplexity "
        "rises by no more than 5%.",
        (_ROUND,),
    ),
    "spectrum": About(
        "Spectrum damage",
        "Is attention still a sum of tones?",
        "Each pair adds one tone to the mean score as a function of distance. Purity is the share of its power that is "
        "still at its own frequency; damage is what is not, weighted by usage, in the pairs that turn at least twice.",
        (_FOPE,),
    ),
    "check": About(
        "Self-checks",
        "Is this checkpoint what it says it is, and is it seen right?",
        "Weights, rotation, frequencies, causality, what attention lets through, and the likelihood of plain text, on "
        "a few tokens.",
    ),
}
