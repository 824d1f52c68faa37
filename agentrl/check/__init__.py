"""`agentrl check`: what breaks an environment's contract, found without a model (design §4)."""

from agentrl.check.findings import Finding, Report, Severity
from agentrl.check.run import check_env

__all__ = ["Finding", "Report", "Severity", "check_env"]
