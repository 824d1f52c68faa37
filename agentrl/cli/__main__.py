"""Run the command line with `python -m agentrl.cli`."""

import os
import sys

from agentrl.cli.main import main

if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
