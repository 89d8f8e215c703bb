"""Malicious clients, as settings: what does a method tolerate, and what does a defence cost?

A share of the clients, drawn by the run's seed, is malicious and attacks in one way, a class of the
registry. Neither methods nor the engine know of it: a transport around another one changes replies
(:class:`~fedharmony.attacks.base.Attacked`), and brings those of clients that train on false
labels. The round's event names who attacked (``malicious``), for reading results; the server sees
replies alone.

Malicious clients work together: each knows the honest replies of the whole cohort, its own and
those that it would send if its labels were false. An attack on something that a method does not ask
for changes nothing.
"""

from fedharmony.attacks.base import Attack, Attacked, Attackers, AttackSettings, attacks

__all__ = ["Attack", "AttackSettings", "Attacked", "Attackers", "attacks"]
