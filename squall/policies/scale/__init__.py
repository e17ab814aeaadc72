"""How many replicas there should be. Arithmetic on a read-only view; the configuration class is the policy.

A policy says what the demand calls for at this instant, role by role, and why. It knows no bounds, cooldowns, failures or
victims: the controller does, once, for all of them. See docs/scaling.md for the equations, and core/fleet_view.py for the view.
"""

from squall.policies.scale.blitz import Blitz
from squall.policies.scale.concurrency import Concurrency
from squall.policies.scale.plans import Fixed, Schedule, Step
from squall.policies.scale.predictive import Predictive
from squall.policies.scale.ttft import Ttft
from squall.policies.scale.utilisation import Utilisation

__all__ = ["Blitz", "Concurrency", "Fixed", "Predictive", "Scale", "Schedule", "Step", "Ttft", "Utilisation"]

Scale = Fixed | Blitz | Ttft | Concurrency | Utilisation | Predictive | Schedule
