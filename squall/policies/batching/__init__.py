"""Which work goes into the next step. Arithmetic on a read-only view; the configuration class is the policy.

Knows no blocks by name, no clock and no engine: the replica takes blocks, preempts and runs.
"""

from squall.policies.batching.lightllm import LightLlm
from squall.policies.batching.reserving import BlitzBatching, FasterTransformer, Orca
from squall.policies.batching.sarathi import Sarathi
from squall.policies.batching.vllm import Vllm
from squall.policies.batching.vllm_v0 import VllmV0

Batching = Vllm | VllmV0 | Sarathi | Orca | FasterTransformer | LightLlm | BlitzBatching

__all__ = ["Batching", "BlitzBatching", "FasterTransformer", "LightLlm", "Orca", "Sarathi", "Vllm", "VllmV0"]
