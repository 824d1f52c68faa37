"""`agentrl check`: what breaks an environment's contract, found without a model (design §4)."""

from agentrl.check.env_check import check_env
from agentrl.check.findings import Finding, Report, Severity

__all__ = ["Finding", "Report", "Severity", "check_env"]
