"""Recorded episodes without training: replay them with the current code, rescore them, or continue them from a turn."""
