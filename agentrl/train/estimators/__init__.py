"""Advantage estimators: one pure function each, in numpy. docs/estimators.md lists their formulas and sources."""

from agentrl.train.estimators.base import Doubles, Episodes, Estimator, Options, estimator, find_estimator, whiten

__all__ = ["Doubles", "Episodes", "Estimator", "Options", "estimator", "find_estimator", "whiten"]
