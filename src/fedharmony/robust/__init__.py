"""Averages of models that tolerate malicious clients: a rule of the registry in place of the mean.

u_k = θ_k − θ is a client's update, w_k the weight that the method gives it. A weight is a claim,
too: under every rule no client weighs more than the median of its cohort's weights. A rule sees one
cohort, of which less than half may be malicious.
"""

from fedharmony.robust.base import ROBUST, Robust, RobustMean, Rule, rules

__all__ = ["ROBUST", "Robust", "RobustMean", "Rule", "rules"]
