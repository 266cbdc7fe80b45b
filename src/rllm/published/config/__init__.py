"""`pkg://rllm.trainer.config`: the published configuration trees, for Hydra to compose."""
