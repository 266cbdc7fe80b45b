"""verl's engine worker as our training backend, and its configurations as ours. Extra `verl`.

backend = "verl"     kind ──► backend (the verbs) ──► worker ──► verl's TrainingWorker, FSDP2
    a verl run of yours  agent_loop ◄── verl's AgentLoopWorker, by the name in its configuration
        on the CPU       plugin, replica ◄── verl's trainer, for `rollout.name=rllm`
    published keys       keys ──► our configuration, or the key that has no counterpart
"""

from rllm.integrations.verl.kind import VERL

__all__ = ("VERL",)
