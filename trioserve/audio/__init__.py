"""From an audio file to samples, and to windows of them. Knows neither models nor servers."""
