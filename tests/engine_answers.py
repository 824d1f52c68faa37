"""An answer of an SGLang server, and a server that gives one answer to every generation."""

import copy
import json

from aiohttp import web
from sglang_double import Double

GOOD = {
    "text": "",
    "output_ids": [4, 5, 6],
    "meta_info": {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_version": "default",
        "finish_reason": {"type": "stop", "matched": 6},
        "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None], [0.0, 6, None]],
    },
}
MISSING = object()


def changed(path, value):
    """The good answer with one value changed. `path`: keys with dots between them."""
    answer = copy.deepcopy(GOOD)
    *way, last = (int(k) if k.isdigit() else k for k in path.split("."))
    at = answer
    for key in way:
        at = at[key]
    if value is MISSING:
        del at[last]
    else:
        at[last] = value
    return answer


class Says(Double):
    """A server that gives one answer to every request of generation, and altered descriptions of itself."""

    said = GOOD
    described = {}

    async def handle(self, request):
        if request.path in self.described:
            return web.Response(text=json.dumps(self.described[request.path]), content_type="application/json")
        return await super().handle(request)

    async def _answer(self, body):
        return web.Response(text=json.dumps(self.said), content_type="application/json")
