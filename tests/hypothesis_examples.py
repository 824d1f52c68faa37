"""How many examples hypothesis tries: a few in `make test`, MORE times as many in `make test-full`."""

import os

from hypothesis import settings

MORE = int(os.environ.get("AGENTRL_EXAMPLES", "1"))


def examples(quick: int, **more) -> settings:
    """A decorator: the number of examples of `make test`."""
    return settings(max_examples=quick * MORE, **more)
