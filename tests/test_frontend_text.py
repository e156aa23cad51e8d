"""Detokenizing and stop strings: what is shown, and when."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from byte_tokenizer import EOS, byte_tokenizer
from trioserve.frontend.detokenizer import Detokenizer
from trioserve.frontend.stop_strings import StopStrings
from trioserve.frontend.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()


def detokenize(token_ids: list[int] | bytes, *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip_special_tokens)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]


def test_a_character_comes_whole_or_not_at_all() -> None:
    assert detokenize("a\U0001fae0b".encode()) == ["a", "", "", "", "\U0001fae0", "b", ""]


@given(st.text(max_size=40))
def test_pieces_joined_are_the_text(text: str) -> None:
    pieces = detokenize(text.encode())
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@given(st.binary(max_size=40))
def test_pieces_joined_are_what_decoding_all_at_once_gives_for_any_bytes(data: bytes) -> None:
    assert "".join(detokenize(data)) == TOKENIZER.decode(list(data))


@given(st.lists(st.sampled_from([*b"ab \xc3\xa9\xf0\x9f\x98\x80", EOS])), st.booleans())
def test_whole_tokens_parts_of_characters_and_special_ones_in_any_order(ids: list[int], skips: bool) -> None:
    pieces = detokenize(ids, skip_special_tokens=skips)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=skips)


def test_bytes_that_never_become_a_character_show_only_at_the_end() -> None:
    cut = "é".encode()[:1]
    assert detokenize(b"a" + cut) == ["a", "", "\ufffd"]


def test_special_tokens_show_only_when_asked_for() -> None:
    assert "".join(detokenize([97, EOS])) == "a"
    assert "".join(detokenize([97, EOS], skip_special_tokens=False)) == "a<eos>"


def feed(stops: StopStrings, pieces: list[str]) -> list[str]:
    return [stops.push(piece) for piece in pieces]


def test_nothing_of_a_stop_string_leaks() -> None:
    stops = StopStrings(["END"], include=False)
    assert feed(stops, ["ab", "cE", "N", "D"]) == ["ab", "c", "", ""]
    assert stops.matched == "END"


def test_what_was_held_back_and_is_no_stop_string_comes_later() -> None:
    stops = StopStrings(["END"], include=False)
    assert feed(stops, ["E", "N", "x"]) == ["", "", "ENx"]
    assert stops.push("E") == ""
    assert stops.flush() == "E"
    assert stops.matched is None


def test_the_stop_string_is_kept_when_asked_for() -> None:
    stops = StopStrings(["END"], include=True)
    assert feed(stops, ["abEN", "Dxyz"]) == ["ab", "END"]


def test_the_earliest_match_wins() -> None:
    stops = StopStrings(["cd", "bc"], include=False)
    assert stops.push("abcd") == "a"
    assert stops.matched == "bc"


def test_a_stop_string_does_not_reach_back_over_unarmed_text() -> None:
    stops = StopStrings(["ab"], include=False)
    assert stops.push("a", armed=False) == "a"
    assert stops.push("b") == "b"
    assert stops.matched is None


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_split_shows_the_text_before_the_first_stop_string(
    size: int, text: str, strings: list[str]
) -> None:
    stops = StopStrings(strings, include=False)
    shown = ""
    for start in range(0, len(text), size):
        shown += stops.push(text[start : start + size])
        if stops.matched is not None:
            break
    else:
        shown += stops.flush()
    if size == 1:
        # With single characters, the match that is complete first is found, by definition.
        ends = [text.find(s) + len(s) for s in strings if s in text]
        seen = text[: min(ends)] if ends else text
    else:
        seen = text[: start + size] if text else ""
    first = min((seen.find(s) for s in strings if s in seen), default=None)
    assert shown == (seen if first is None else seen[:first])


def test_a_decoder_that_rereads_bytes_loses_no_text() -> None:
    """SentencePiece's spelling of bytes: a letter after half a character makes the library start over."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(Tokenizer(backend, {}, None), skip_special_tokens=True)
    pieces = [detokenizer.push(token_id) for token_id in (0x41 + 1, 0xE2 + 1, 257, 257)] + [
        detokenizer.flush()
    ]
    assert "".join(pieces).replace("\ufffd", "") == "Aaa"


def test_a_space_is_kept_where_the_output_goes_on_with_the_prompts_text() -> None:
    """Llama 2's tokenizer drops the space before the first word of a text, which the output's is not."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={"<unk>": 0, "▁a": 1, "▁b": 2}, merges=[], unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, {}, None)
    whole, prompt = tokenizer.decode([1, 2, 1]), tokenizer.decode([1])
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, context=[1])
    assert (
        "".join([detokenizer.push(2), detokenizer.push(1), detokenizer.flush()])
        == whole[len(prompt) :]
        == " b a"
    )
