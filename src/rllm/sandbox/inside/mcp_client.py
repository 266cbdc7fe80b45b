#!/usr/bin/env python3
"""Calls tools of the MCP servers that a task brings: a program of the task's sandbox, of the library alone.

    /run/mcp                                  {"SERVER": [{"name", "description", "inputSchema"}]} as JSON
    /run/mcp SERVER TOOL '{"city": "Oslo"}'   what the tool gives; exit code 1 where it says that it failed

Each server is started for one call and spoken to over its standard input and output (Model Context Protocol,
revision 2025-06-18: initialize, notifications/initialized, tools/list, tools/call). What it writes to its
standard error is shown, as it is where it ends in between.
"""

import json
import os
import subprocess
import sys

SETTINGS = "/run/mcp.json"
VERSION = "2025-06-18"


class _Server:
    """One that runs until it is closed."""

    def __init__(self, name, settings):
        self.name = name
        self._number = 0
        self._process = subprocess.Popen(
            [settings["command"], *settings["args"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings["env"]},
        )
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "so is this"
        self._requests, self._answers = self._process.stdin, self._process.stdout
        client = {"name": "rllm", "version": "1"}
        self.ask("initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client})
        self._send({"method": "notifications/initialized"})

    def ask(self, method, params):
        """The result of a request; other messages of the server are passed over."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        for line in self._answers:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a server that prints beside the protocol
            if not isinstance(message, dict) or message.get("id") != self._number or "method" in message:
                continue
            if "error" in message:
                sys.exit(f"{self.name}: {method} failed: {json.dumps(message['error'])}")
            return message["result"]
        sys.exit(
            f"The MCP server {self.name} ended with code {self._process.wait()} before it answered {method}."
        )

    def tools(self):
        tools, cursor = [], None
        while True:
            page = self.ask("tools/list", {"cursor": cursor} if cursor else {})
            tools += page["tools"]
            cursor = page.get("nextCursor")
            if not cursor:
                return tools

    def close(self):
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message):
        try:
            self._requests.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            sys.exit(f"The MCP server {self.name} ended with code {self._process.wait()}.")


def main(words):
    with open(SETTINGS, encoding="utf-8") as stream:
        servers = json.load(stream)
    if not words:
        tools = {}
        for name in servers:
            server = _Server(name, servers[name])
            tools[name] = server.tools()
            server.close()
        print(json.dumps(tools))
        return 0
    if len(words) not in (2, 3) or words[0] not in servers:
        return f"usage: /run/mcp SERVER TOOL JSON, with a server of {', '.join(servers)}"
    try:
        arguments = json.loads(words[2]) if len(words) == 3 else {}
    except ValueError as error:
        return f"the arguments are no JSON: {error}"
    server = _Server(words[0], servers[words[0]])
    result = server.ask("tools/call", {"name": words[1], "arguments": arguments})
    server.close()
    for part in result.get("content", []):
        print(part["text"] if part.get("type") == "text" else json.dumps(part))
    return int(bool(result.get("isError")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
