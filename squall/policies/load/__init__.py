"""How weights reach new replicas. Arithmetic on a read-only view; the configuration class is the policy.

A policy says from where, along which replicas, and which overloaded replica a target relieves while it loads (`live`). It knows
no links by name and moves no byte. See docs/scaling.md, and core/fleet_view.py for the view and for `Transfer`.
"""

from squall.policies.load.auto import Auto
from squall.policies.load.peers import Chain, P2p, Striped
from squall.policies.load.storage import Disk, Host, Mock

__all__ = ["Auto", "Chain", "Disk", "Host", "Load", "Mock", "P2p", "Striped"]

Load = Disk | Host | P2p | Chain | Striped | Auto | Mock
