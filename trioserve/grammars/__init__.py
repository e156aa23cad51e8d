"""Structured output: from what a request asks for to masks over the vocabulary, by llguidance.

    StructuredOutputsParams ─ write_grammar ─▶ llguidance's notation ─ compile_grammar ─▶ CompiledGrammar
                              └────────── check (in a child process) ──────────┘               │ new_matcher
                                                                                               ▼
                                                                        Matcher, one per sequence

Nothing here imports torch or trio. `trioserve.link.grammar_compiler` is the asynchronous side.
"""
