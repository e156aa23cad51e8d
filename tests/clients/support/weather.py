"""What the tests of tools and of structured output ask for. Only the standard library."""

from __future__ import annotations

from typing import Any

__all__ = ["PERSON", "PERSON_QUESTION", "WEATHER", "WEATHER_QUESTION", "WEATHER_REPORT"]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The city, such as Rome"}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Arguments of the function get_weather."""

WEATHER_QUESTION = "What is the weather in Paris?"

WEATHER_REPORT = "Say to the user: it is 17 degrees in Paris."
"""The function's result. As long as a model as small as ours is shown the function, it calls it again and
again; so the tests offer it once, and the answer to the result is made without it."""

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

PERSON_QUESTION = "Bob is 42 years old. Answer with his name and age as JSON."
