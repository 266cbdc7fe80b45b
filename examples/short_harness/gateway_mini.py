"""mini-SWE-agent, started without LiteLLM: its own client by `requests`, at the address of the gateway.

To import LiteLLM takes 4 seconds of processor time, and a whole episode without it takes one.
"""

import os

from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel
from minisweagent.run.mini import app


class GatewayModel(OpenRouterTextbasedModel):
    """Asks for chat completions at OPENAI_BASE_URL."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"


if __name__ == "__main__":
    app()
