"""A GGUF file's SentencePiece vocabulary as a tokenizer.

SentencePiece merges the neighbouring pair of pieces whose whole has the highest score, with no list of pairs.
The `tokenizers` library wants the pairs, best first: they are found by cutting each piece in two in all ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trioserve.model_sources.gguf_vocabulary import NORMAL, USER_DEFINED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trioserve.model_sources.gguf_vocabulary import Vocabulary

__all__ = ["sentencepiece_tokenizer"]

_SPACE = "▁"
"""What stands for a space (U+2581)."""


def sentencepiece_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer, but for what it puts before a text's tokens."""
    tokens = [_spelling(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)]
    bpe = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(tokens, vocabulary),
        unk_token=vocabulary.token("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    first = "first" if vocabulary.adds_space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=first, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space:
        steps.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    # Runs of spaces are no longer spelled as in the text: the merges make them.
    tokenizer.add_tokens([token for token in vocabulary.added_tokens if not _is_spaces(token.content)])
    return tokenizer


def _is_spaces(token: str) -> bool:
    return len(token) > 1 and not token.strip(" ")


def _spelling(token: str, kind: int) -> str:
    """Gemma's files have the runs of spaces, which are user-defined tokens, as they are in a text."""
    return _SPACE * len(token) if kind == USER_DEFINED and _is_spaces(token) else token


def _merges(tokens: Sequence[str], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Best first: user-defined tokens in the file's order, then the others by falling score; of the ways to
    make one token, those with the longer first half."""
    kinds, scores = vocabulary.kinds, vocabulary.scores
    defined = [tokens[index] for index, kind in enumerate(kinds) if kind == USER_DEFINED]
    normal = [index for index, kind in enumerate(kinds) if kind == NORMAL]
    normal.sort(key=lambda index: -scores[index])
    ranked = defined + [tokens[index] for index in normal]
    known = set(ranked)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]
