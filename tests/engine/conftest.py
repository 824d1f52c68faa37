"""The models of the local engine."""

import pytest
from local_models import KINDS, build


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: build(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="session")
def others(tmp_path_factory):
    return build(tmp_path_factory.mktemp("others"), seed=1)
