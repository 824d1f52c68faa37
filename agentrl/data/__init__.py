"""Tasks: where they come from, and the order in which episodes are issued."""
