"""The least that a proxy can cost: bytes in, bytes out, nothing looked at. A part of `gateway.py`.

python gateway_forwarder.py UPSTREAM_URL
"""

import asyncio
import json
import resource
import sys

import aiohttp
import uvloop
from aiohttp import web


class Forwarder:
    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers={"Accept-Encoding": "identity"}
        )

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await http.read()
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.upstream, data=body, headers=headers) as reply:
            if "event-stream" not in reply.content_type:
                return web.Response(body=await reply.read(), content_type=reply.content_type)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(http)
            while part := await reply.content.readany():
                await response.write(part)
            await response.write_eof()
            return response


async def serve(upstream: str) -> None:
    runner = web.ServerRunner(web.Server(Forwarder(upstream).handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=16_384).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    if len(sys.argv) != 2:
        print("gateway_forwarder.py is a part of gateway.py, which starts it.")
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
