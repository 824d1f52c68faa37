"""Functions written for slime: `--custom-generate-function-path`, `--custom-rm-path`, `--group-rm` and `--rollout-function-path`.

Such a function imports `Sample`, `GenerateState` and `post` from slime; these imports work without slime (`modules.py`). Its requests to the
engine's address are answered by the engine of the run (`generations.py`), so every sampled token is known with its log-prob and the version
of the weights. The samples that the function returns are compared with them (`placement.py`): a token that it marks as trained must be one
that the engine sampled after exactly the tokens before it.
"""

from agentrl.slime_hooks.modules import GenerateState, post
from agentrl.slime_hooks.sample import SlimeSample

__all__ = ["GenerateState", "SlimeSample", "post"]
