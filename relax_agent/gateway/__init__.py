"""The gateway: agent programs of others, trained without a change.

A program that uses the SDK of OpenAI or Anthropic gets a base URL and a key of its own for each
episode, and every answer is sampled by the engines of the run. What it is told and what was sampled
becomes the episode's token log.

    history.py   is this request's history the one that we know, in other words?
    session.py   one episode: from a request to sampled tokens in the log
    dialect.py   what all dialects share
    chat.py      OpenAI chat completions
    responses.py OpenAI responses
    anthropic.py Anthropic messages
    server.py    keys, routes, limits
"""

from relax_agent.gateway.server import Gateway
from relax_agent.gateway.session import ChatRequest, GatewaySession

__all__ = ["ChatRequest", "Gateway", "GatewaySession"]
