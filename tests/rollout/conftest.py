"""An executor of tool calls."""

import pytest

from agentrl.rollout.tool_executor import ToolExecutor


@pytest.fixture
def tool_executor():
    made = ToolExecutor()
    yield made
    made.close()
