"""Many prompts at once, without writing a line of async code."""

from __future__ import annotations

from trioserve import LLM, SamplingParams


def main() -> None:
    prompts = ["The capital of France is", "Water boils at", "The opposite of hot is"]
    with LLM(model="smollm2-135m") as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

        conversation = [{"role": "user", "content": "Name a primary colour."}]
        (answer,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=16))
        print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
