"""Passkey prompts: exact length, the key where it is said to be, the same from the same seed."""

import re
import string

import numpy as np
import pytest
from conftest import word_tokenizer

from rope_probe.errors import ProbeError, UsageError
from rope_probe.probes.passkey import PromptWriter

CHARACTERS = ["<unk>", "<s>", *string.ascii_letters, *string.digits, *" .,?\n"]


def character_tokenizer(adds_bos=False):
    """One token for each character that the prompts need."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({character: i for i, character in enumerate(CHARACTERS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module", params=["bytes and pairs", "characters", "characters after a BOS"])
def tokenizer(request):
    if request.param == "bytes and pairs":
        return request.getfixturevalue("smollm2").tokenizer
    return character_tokenizer("BOS" in request.param)


@pytest.fixture(scope="module")
def write(tokenizer):
    return PromptWriter(tokenizer)


@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize("extra", [0, 1, 37, 500])
def test_length_is_exact_and_the_key_is_where_it_is_said_to_be(write, tokenizer, extra, keys):
    length = write.shortest(keys) + extra
    for depth in (0.0, 0.3, 1.0):
        prompt = write(length, depth, keys)
        assert prompt.ids.shape == (length,)
        for at in (prompt.position, length - prompt.answer):  # hidden in the text, and the answer at the end
            assert tokenizer.decode(prompt.ids[at : at + prompt.answer]).strip() == prompt.key
        assert re.fullmatch(r"[1-9]\d{4}", prompt.key)


@pytest.mark.parametrize("keys", [1, 3])
def test_the_key_asked_for_is_the_one_hidden_under_its_place(write, tokenizer, keys):
    prompt = write(write.shortest(keys) + 200, 0.5, keys)
    text = tokenizer.decode(prompt.ids)
    hidden = dict(re.findall(r"The pass key of (\w+) is (\d{5})\.", text))
    question = re.search(r"What is the pass key of (\w+)\? The pass key of \1 is (\d{5})$", text)
    assert len(hidden) == keys == len(set(hidden.values()))
    assert hidden[question[1]] == question[2] == prompt.key


def test_tokens_are_those_of_the_whole_text(write, tokenizer):
    """Lines are tokenized one by one; the first may start in the middle of a word."""
    ids = write(write.shortest() + 300, 0.5).ids.tolist()
    text = tokenizer.decode(ids)
    whole = text[text.index("\n") :]
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert ids[-len(expected) :] == expected


def test_a_bos_comes_first(smollm2):
    prompt = PromptWriter(character_tokenizer(True))(400, 0.0)
    assert prompt.ids[0] == 1 and (prompt.ids[1:] != 1).all()
    assert (PromptWriter(character_tokenizer())(400, 0.0).ids != 1).all()


def test_depth_is_that_of_the_nearest_end_of_a_line(write):
    length = write.shortest() + 1500
    places = [write(length, depth).position for depth in np.linspace(0, 1, 9)]
    assert places == sorted(places) and len(set(places)) == 9
    longest = max(map(len, write.filler))
    room = 1500  # all of it filler
    for depth, place in zip(np.linspace(0, 1, 9), places, strict=True):
        assert abs(place - places[0] - depth * room) <= longest / 2 + 8


def test_the_same_seed_and_sample_give_the_same_prompt(tokenizer, write):
    first, again = write(700, 0.5, 2, 1, 3), PromptWriter(tokenizer)(700, 0.5, 2, 1, 3)
    np.testing.assert_array_equal(first.ids, again.ids)
    assert write(700, 0.0, 1, 1, 3).key == write(900, 1.0, 2, 1, 3).key == first.key
    others = {write(700, 0.5, 2, sample, seed).key for sample, seed in ((0, 3), (2, 3), (1, 4), (3, 1))}
    assert len(others) == 4 and first.key not in others


def test_the_shortest_prompt_fits_and_less_is_refused(write):
    for keys in (1, 3):
        for sample in range(5):
            write(write.shortest(keys), 0.5, keys, sample)
        with pytest.raises(UsageError, match="too short for"):
            write(write.shortest(keys) // 2, 0.5, keys)


def test_tokenizers_that_cannot_write_a_key_are_refused():
    with pytest.raises(ProbeError, match="there is none"):
        PromptWriter(None)
    with pytest.raises(ProbeError, match="digits"):
        PromptWriter(word_tokenizer())
