"""What transformers gives, in float32; run by trioserve's own Python, which has torch.

reference.py MODEL prints where the tokenizer is. With [context, continuation] pairs as JSON on its input, it
prints log-likelihoods instead: of each continuation's tokens after its context.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers

from trioserve import EngineArgs
from trioserve.model_sources import SilentProgress, resolve_model


def main() -> None:
    config = EngineArgs(model=sys.argv[1], dtype="float32").create_engine_config()
    resolved = resolve_model(config.model, SilentProgress())
    pairs = json.loads(sys.stdin.read() or "null")
    if pairs is None:
        print(json.dumps(str(resolved.tokenizer_directory)))
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolved.tokenizer_directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(resolved.directory, dtype=torch.float32)
    found = []
    for context, continuation in pairs:
        tokens = tokenizer(context + continuation)["input_ids"]
        begin = len(tokenizer(context)["input_ids"])
        if not begin:  # a text by itself comes after a token that begins texts
            tokens, begin = [tokenizer.bos_token_id or tokenizer.eos_token_id, *tokens], 1
        with torch.inference_mode():
            scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        chosen = [scores[index - 1, tokens[index]].item() for index in range(begin, len(tokens))]
        found.append(chosen)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
