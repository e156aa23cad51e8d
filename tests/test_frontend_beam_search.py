"""Beam search: against an exhaustive one, and against transformers."""

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from helpers_beam_search import Model, log_softmax, random_model, search, tokens_of
from trioserve import BeamSearchParams
from trioserve.frontend.beam_search import BeamSearch
from trioserve.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.7])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_search_wide_enough_for_everything_finds_the_best_of_everything(
    length_penalty: float, temperature: float, ignore_eos: bool
) -> None:
    """3 tokens, one of them EOS, at most 4 of them: 1 + 2 + 4 + 8 ends with EOS, and 16 without."""
    model, prompt, eos, steps = random_model(3), [1], 0, 4
    params = BeamSearchParams(
        beam_width=64,
        max_tokens=steps,
        length_penalty=length_penalty,
        temperature=temperature,
        ignore_eos=ignore_eos,
    )
    expected: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(3), repeat=steps):
        end = tokens.index(eos) + 1 if eos in tokens and not ignore_eos else steps
        total = sum(
            log_softmax(model([*prompt, *tokens[:place]]) / (temperature or 1.0))[tokens[place]]
            for place in range(end)
        )
        expected[tokens[:end]] = total / end**length_penalty
    best = sorted(expected.items(), key=lambda item: -item[1])[:64]

    finished = search(model, prompt, params, [eos]).finished
    assert [tuple(tokens_of(beam, prompt)) for beam in finished] == [tokens for tokens, _ in best]
    assert [beam.score for beam in finished] == pytest.approx([score for _, score in best])
    for beam in finished:
        ends = tokens_of(beam, prompt)[-1] == eos and not ignore_eos
        assert beam.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        model.lm_head.weight *= 60  # as decided as a trained model
    return model


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


def logits_of(llama: LlamaForCausalLM) -> Model:
    def logits(tokens: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            return llama(torch.tensor([list(tokens)])).logits[0, -1].numpy()

    return logits


@pytest.mark.parametrize("beam_width", [2, 4])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("prompt", [[3], [7, 30, 2]])
def test_it_finds_what_transformers_finds(
    llama: LlamaForCausalLM, beam_width: int, length_penalty: float, prompt: list[int]
) -> None:
    eos = [0, 1, 5, 9, 14, 23]  # so that some sequences end
    settings = GenerationConfig(
        num_beams=beam_width,
        num_return_sequences=beam_width,
        do_sample=False,
        max_new_tokens=8,
        length_penalty=length_penalty,
        early_stopping="never",
        eos_token_id=eos,
        pad_token_id=39,
        return_dict_in_generate=True,
        output_scores=True,
    )
    theirs = llama.generate(torch.tensor([prompt]), generation_config=settings)
    expected = [
        list(itertools.takewhile(lambda token: token != 39, sequence))
        for sequence in theirs.sequences[:, len(prompt) :].tolist()
    ]
    params = BeamSearchParams(beam_width=beam_width, max_tokens=8, length_penalty=length_penalty)
    finished = search(logits_of(llama), prompt, params, eos).finished
    assert [tokens_of(beam, prompt) for beam in finished] == expected
    assert [beam.score for beam in finished] == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
def test_a_width_of_one_is_greedy_decoding(seed: int, length_penalty: float) -> None:
    model, eos = random_model(6, seed), [2]
    tokens = [4]
    while len(tokens) < 13 and tokens[-1] not in eos:
        tokens.append(int(model(tokens).argmax()))
    params = BeamSearchParams(beam_width=1, max_tokens=12, length_penalty=length_penalty)
    (beam,) = search(model, [4], params, eos).finished
    assert array("i", beam.token_ids).tolist() == tokens


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.0])
def test_stopping_early_changes_nothing(length_penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=16, length_penalty=length_penalty)
    saved = 0
    for seed in range(8):
        model = random_model(5, seed)
        early = search(model, [1], params, [0])
        with monkeypatch.context() as patch:
            patch.setattr(BeamSearch, "_is_settled", lambda _: False)
            late = search(model, [1], params, [0])
        assert [beam.token_ids for beam in early.finished] == [beam.token_ids for beam in late.finished]
        saved += late._length - early._length
    assert saved > 0


@pytest.mark.parametrize("length_penalty", [1e300, -1e300, 500.0, -500.0])
def test_no_length_penalty_is_too_much(length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=length_penalty)
    assert len(search(random_model(4), [1], params, [0]).finished) == 2
