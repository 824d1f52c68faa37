"""`agentrl check`: find violations of an environment's contract, without a model."""

from agentrl.check.env_check import check_env
from agentrl.check.findings import Finding, Report, Severity

__all__ = ["Finding", "Report", "Severity", "check_env"]
