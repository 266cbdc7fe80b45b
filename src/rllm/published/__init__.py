"""Published names: what programs for published rLLM import, and what it is here.

`rllm` itself registers the finder; nothing else imports this room.
"""
