"""From a model's text to what it says: reasoning, words, and calls of tools."""
