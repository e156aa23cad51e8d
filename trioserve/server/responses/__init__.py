"""The Responses API: responses that are told in items and events, kept, and made in the background."""
