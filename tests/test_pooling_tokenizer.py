"""Texts and pairs to token ids: what transformers makes of them with the same tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from trioserve import InvalidRequestError, PairPrompt, TextPrompt, TokensPrompt
from trioserve.frontend.pooling_tokenizer import PoolingTokenizer
from trioserve.frontend.prompts import Truncation
from trioserve.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

_SPECIAL = [("[CLS]", 1), ("[SEP]", 2)]
FORMS = {
    "BERT": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=_SPECIAL
    ),
    "RoBERTa": processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1), trim_offsets=False),
    "no special tokens": None,
}
WORDS = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]


def text_of(length: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + place) % 26] for place in range(length))


@pytest.fixture(params=FORMS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    vocab = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = Backend(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = FORMS[request.param]
    # As some models' files have it; neither is a limit of the model.
    backend.enable_truncation(4)
    backend.enable_padding(length=128)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    return tmp_path


@pytest.fixture
def ours(directory: Path) -> PoolingTokenizer:
    return PoolingTokenizer(Tokenizer.from_directory(str(directory)), max_model_len=12)


@pytest.fixture
def theirs(directory: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))


LENGTHS = [0, 1, 3, 7, 8, 20]


@pytest.mark.parametrize("keeps_end", [True, False])
def test_texts(ours: PoolingTokenizer, theirs: PreTrainedTokenizerFast, keeps_end: bool) -> None:
    theirs.truncation_side = "left" if keeps_end else "right"
    for limit in (None, 5, 12):
        texts = [text_of(length) for length in LENGTHS]
        truncation = None if limit is None else Truncation(limit, keeps_end=keeps_end)
        found = ours.tokenize([TextPrompt(text, truncation=truncation) for text in texts], in_pieces=False)
        wanted = theirs(texts, truncation=limit is not None, max_length=limit)
        assert [list(text.token_ids) for (text,) in found] == wanted["input_ids"]
        assert not any(text.type_ids for (text,) in found)


@pytest.mark.parametrize("keeps_end", [True, False])
def test_pairs_lose_the_end_of_the_longer_text_first(
    ours: PoolingTokenizer, theirs: PreTrainedTokenizerFast, keeps_end: bool
) -> None:
    theirs.truncation_side = "left" if keeps_end else "right"
    for limit in (None, 7, 8, 11):
        pairs = [(text_of(one), text_of(other, first=9)) for one in LENGTHS for other in LENGTHS]
        truncation = None if limit is None else Truncation(limit, keeps_end=keeps_end)
        found = ours.tokenize([PairPrompt(*pair, truncation) for pair in pairs], in_pieces=False)
        wanted = theirs(
            [pair[0] for pair in pairs],
            [pair[1] for pair in pairs],
            truncation="longest_first" if limit else False,
            max_length=limit,
            return_token_type_ids=True,
        )
        assert [list(text.token_ids) for (text,) in found] == wanted["input_ids"]
        if theirs.num_special_tokens_to_add():  # models that tell two texts apart have some between them
            for (text,), types in zip(found, wanted["token_type_ids"], strict=True):
                assert list(text.type_ids) == (types if any(types) else [])


def test_pieces_are_whole_texts_of_their_own(ours: PoolingTokenizer, theirs: PreTrainedTokenizerFast) -> None:
    num_special = theirs.num_special_tokens_to_add()
    size = 12 - num_special
    text = text_of(25)
    (pieces, fits, ids) = ours.tokenize(
        [TextPrompt(text), TextPrompt(text_of(size)), TokensPrompt(list(range(3, 28)))], in_pieces=True
    )
    wanted = [" ".join(text.split()[start : start + size]) for start in range(0, 25, size)]
    assert [list(piece.token_ids) for piece in pieces] == theirs(wanted)["input_ids"]
    assert len(fits) == 1
    assert [list(piece.token_ids) for piece in ids] == [
        list(range(3, 15)),
        list(range(15, 27)),
        [27],
    ]


def test_a_text_with_its_special_tokens_gets_no_others(ours: PoolingTokenizer) -> None:
    prompt = TextPrompt("[CLS] a b", add_special_tokens=False)
    ((plain,), (cut,)) = ours.tokenize(
        [prompt, TextPrompt("a b c", add_special_tokens=False, truncation=Truncation(2))], in_pieces=False
    )
    assert len(plain.token_ids) >= 3
    assert list(cut.token_ids) == [4, 5]


def test_a_truncation_leaves_room_for_text(ours: PoolingTokenizer, theirs: PreTrainedTokenizerFast) -> None:
    num_special = theirs.num_special_tokens_to_add(pair=True)
    if num_special:
        with pytest.raises(InvalidRequestError, match=f"at least {num_special + 1}, of which {num_special}"):
            ours.tokenize([PairPrompt("a", "b", Truncation(num_special))], in_pieces=False)
