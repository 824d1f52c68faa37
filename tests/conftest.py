"""What holds for all tests: quick ones first, those this machine cannot run skipped with a reason, one hypothesis profile."""

import importlib.util
import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

NEEDS = {
    "gpu": (shutil.which("nvidia-smi") is not None, "needs a CUDA GPU"),
    "sglang": (importlib.util.find_spec("sglang") is not None, "needs the package sglang"),
}
LATE = ("slow", "gpu", "sglang", "full")


def pytest_collection_modifyitems(items):
    for item in items:
        for marker, (there, reason) in NEEDS.items():
            if not there and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: max((i for i, m in enumerate(LATE, 1) if item.get_closest_marker(m)), default=0))
