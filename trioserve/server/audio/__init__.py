"""The routes of models that hear."""
